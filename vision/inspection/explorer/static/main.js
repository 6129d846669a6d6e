// Puts the page together: reads the numbers, listens, renders.

const NAMES = {
  image: 'image', stage: 'stage', tiles: 'tiles', scale: 'scale', strip: 'strip', readout: 'readout',
  classes: 'classes', classesBox: 'classes-box', method: 'method', row: 'direction-row',
  column: 'direction-column', methodSettings: 'method-settings', displaySettings: 'display-settings',
  source: 'source', help: 'help', methodsTab: 'methods', explore: 'explore', what: 'what', whose: 'whose',
  low: 'low', middle: 'middle', high: 'high', notice: 'notice', rung: 'rung', note: 'matrix-note',
};

function createPage(model) {
  const elements = {};
  for (const [name, id] of Object.entries(NAMES)) elements[name] = document.getElementById(id);
  const page = {
    model, elements, controls: [], key: null, shown: null, result: null, pending: false,
    colours: readColours(document.getElementById('colours').textContent), hatches: new Map(), images: new Map(),
    first: startState(model), state: readHash(location.hash, model), theme: {},
  };
  const canvas = document.createElement('canvas');
  const context = canvas.getContext('2d', { willReadFrequently: true });
  page.scratch = (width, height) => {
    if (canvas.width < width) canvas.width = width;
    if (canvas.height < height) canvas.height = height;
    return { canvas, context };
  };
  page.tileImage = (width, height) => {
    const key = `${width} ${height}`;
    if (!page.images.has(key)) page.images.set(key, new ImageData(width, height));
    return page.images.get(key);
  };
  page.row = (layout) => {
    if (!layout.buffer) layout.buffer = new Float32Array(layout.tokens);
    return layout.buffer.fill(0);
  };
  page.sizes = () => {
    page.measured = page.measured || {
      stage: elements.stage.clientWidth, tiles: elements.tiles.parentElement.clientWidth,
      scale: elements.scale.parentElement.clientWidth,
      tilesHeight: elements.tiles.parentElement.clientHeight,
    };
    return page.measured;
  };
  page.packed = (signed, muted) => page.packed[`${Boolean(signed)} ${muted}`];
  page.hatch = (target, colour = '#ffffff') => {
    if (!page.hatches.has(colour)) page.hatches.set(colour, makeHatch(target, colour));
    return page.hatches.get(colour);
  };
  page.queryLayout = () => {
    const { state } = page;
    if (methodOf(state.method).head || !methodOf(state.method).query) return model.layers[state.layer].layout;
    return model.layers[state.direction === 'row' ? state.end : state.start].layout;
  };
  page.update = (patch) => {
    page.state = sound({ ...page.state, ...patch }, model);
    schedule(page);
  };
  return page;
}

function makeHatch(target, colour) {
  const canvas = document.createElement('canvas');
  canvas.width = canvas.height = 6;
  const context = canvas.getContext('2d');
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(-1, 7);
  context.lineTo(7, -1);
  context.stroke();
  return target.createPattern(canvas, 'repeat');
}

// Colours as one number each, for pixels; those of muted heads are mixed with the ground.
function packColours(page) {
  const whole = ([red, green, blue]) => ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  const probe = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const read = (colour) => {
    probe.fillStyle = colour;
    probe.fillRect(0, 0, 1, 1);
    return Array.from(probe.getImageData(0, 0, 1, 1).data.subarray(0, 3));
  };
  const ground = read(page.theme.soft);
  for (const signed of [false, true]) {
    const table = signed ? page.colours.differences : page.colours.shares;
    for (const muted of [false, true]) {
      page.packed[`${signed} ${muted}`] = Uint32Array.from({ length: 256 }, (_, entry) => whole(
        ground.map((base, band) => Math.round(muted ? 0.75 * base + 0.25 * table[3 * entry + band] : table[3 * entry + band]))));
    }
  }
  page.packed.soft = whole(ground);
  page.packed.line = whole(read(page.theme.quiet));
}

function schedule(page) {
  if (page.pending) return;
  page.pending = true;
  requestAnimationFrame(() => { page.pending = false; render(page); });
}

function render(page) {
  const { state, elements } = page;
  elements.explore.hidden = state.tab !== 'explore';
  elements.methodsTab.hidden = state.tab !== 'methods';
  applyTheme(page);
  const settings = JSON.stringify({ ...state, query: null });
  if (settings !== page.synced) page.controls.forEach((sync) => sync(state));
  page.synced = settings;
  // A pointer that moves while a query is pinned changes the readout only.
  const changed = page.drawn !== state || !page.tiles;
  if (changed) {
    page.result = evaluate(page.model, state, state.query);
    page.shown = shownMap(page);
    syncTabs(page);
  }
  // A frame that is not shown has no size to draw in; it is drawn when it gets one.
  if (state.tab === 'explore' && page.sizes().stage > 0) {
    drawImage(page, page.shown);
    if (changed) {
      drawScale(page, page.shown);
      drawTiles(page);
      page.drawn = state;
    }
    syncStrip(page);
    syncReadout(page);
    syncWords(page);
  }
  clearTimeout(page.writing);
  page.writing = setTimeout(() => writeAddress(page), 150);
}

function shownMap(page) {
  const { model, state, result } = page;
  if (!result) return null;
  let cells = cellValues(result);
  if (state.other) {
    const other = evaluate(model, state, state.other);
    if (!other) return null;
    cells = cells.map((value, cell) => value - cellValues(other)[cell]);
  }
  const signed = Boolean(state.other);
  return {
    layout: result.layout, cells, signed,
    high: upperLimit(cells, state, result.uniform, model.header.least_limit),
    kept: signed ? null : heaviest(cells, state.mass),
  };
}

function syncWords(page) {
  const { state, elements, shown, result, model } = page;
  const method = methodOf(state.method);
  elements.what.textContent = method.title;
  const parts = [];
  if (method.head) parts.push(`layer ${state.layer}, ${headName(state.head, state.fusion)}`);
  if (method.forClass) parts.push(model.header.classes[state.klass].name);
  if (method.query) parts.push(state.pinned ? (state.other ? 'two queries' : 'query pinned') : 'hover = query');
  elements.whose.textContent = parts.join(' · ');
  const high = shown ? shown.high : 0;
  const times = result && result.uniform ? ` = ${number(high * result.uniform)} × uniform` : '';
  elements.low.textContent = shown && shown.signed ? `−${number(high)}` : '0';
  elements.high.textContent = `${number(high)}${times}`;
  const unit = result ? { weight: 'attention weight', share: 'share', relevance: 'relevance', length: 'length' }[result.unit] : '';
  elements.middle.textContent = shown && shown.signed ? 'first − second' : unit;
  elements.note.textContent = state.other ? 'difference of the two queries'
    : state.direction === 'row' ? 'where the query looks' : 'who looks at the query';
}

function syncTabs(page) {
  for (const name of ['explore', 'methods']) {
    document.getElementById(`tab-${name}`).setAttribute('aria-selected', String(page.state.tab === name));
  }
}

function applyTheme(page) {
  const root = document.documentElement;
  const dark = page.state.theme ? page.state.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  const theme = dark ? 'dark' : 'light';
  if (root.dataset.theme === theme && page.theme.ink) return;
  root.dataset.theme = theme;
  const style = getComputedStyle(root);
  const read = (name) => style.getPropertyValue(name).trim();
  page.theme = { ink: read('--ink'), quiet: read('--quiet'), accent: read('--accent'), mark: read('--mark'), soft: read('--soft'), font: getComputedStyle(document.body).fontFamily };
  page.hatches.clear();
  page.drawn = null;
  packColours(page);
}

// A query that only follows the pointer is not part of the address.
function writeAddress(page) {
  const state = page.state.pinned ? page.state : { ...page.state, query: page.first.query };
  const hash = writeHash(state, page.first);
  if (hash === location.hash.replace(/^#/, '')) return;
  page.written = hash;
  location.replace(`#${hash}`);
}

function notice(page, text) {
  page.elements.notice.textContent = text;
  page.elements.notice.hidden = false;
  clearTimeout(page.noticing);
  page.noticing = setTimeout(() => { page.elements.notice.hidden = true; }, 4000);
}

async function copyLink(page) {
  writeAddress(page);
  if (!navigator.clipboard) { notice(page, `Copy it from the address bar: ${location.href}`); return; }
  try {
    await navigator.clipboard.writeText(location.href);
    notice(page, 'Link to this view copied.');
  } catch (error) {
    notice(page, `Not allowed to copy (${error.message}). The address bar has the link.`);
  }
}

// The image with its legend and its words, as a file.
function composeImage(page) {
  const { elements, theme } = page;
  const ratio = window.devicePixelRatio || 1;
  const [wide, high] = [elements.image.width, elements.image.height];
  const canvas = document.createElement('canvas');
  const lines = [
    `${elements.what.textContent} · ${elements.whose.textContent}`,
    Array.from(elements.readout.children, (row) => `${row.children[0].textContent}: ${row.children[1].textContent}`).join(' · '),
    `${elements.low.textContent} to ${elements.high.textContent} (${elements.middle.textContent})`,
    `${page.model.header.title} · ${page.model.header.model}`,
  ];
  const margin = 12 * ratio;
  canvas.width = Math.max(wide, 420 * ratio) + 2 * margin;
  const context = canvas.getContext('2d');
  context.font = `${12 * ratio}px ${theme.font}`;
  const wrapped = lines.flatMap((line) => wrap(context, line, canvas.width - 2 * margin));
  canvas.height = high + 3 * margin + 14 * ratio + 18 * ratio * wrapped.length;
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(elements.image, margin, margin);
  context.drawImage(elements.scale, margin, high + 2 * margin, wide, 10 * ratio);
  context.fillStyle = theme.ink;
  context.font = `${12 * ratio}px ${theme.font}`;
  wrapped.forEach((line, i) => context.fillText(line, margin, high + 2 * margin + (28 + 18 * i) * ratio));
  return canvas;
}

function wrap(context, text, width) {
  const lines = [''];
  for (const word of text.split(' ')) {
    const longer = `${lines[lines.length - 1]} ${word}`.trim();
    if (context.measureText(longer).width <= width) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines.filter(Boolean);
}

function saveImage(page) {
  composeImage(page).toBlob((blob) => {
    const link = make('a', { href: URL.createObjectURL(blob), download: `${page.model.header.title.replace(/[^\w-]+/g, '_') || 'attention'}_${page.state.method}.png` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    notice(page, 'Saved as PNG.');
  });
}

async function start() {
  const begin = performance.now();
  const header = JSON.parse(document.getElementById('header').textContent);
  const numbers = document.getElementById('numbers');
  const buffer = await inflate(numbers.textContent);
  numbers.remove();
  await document.getElementById('source').decode();
  readMethods(header);
  const model = { header, buffer, layers: readLayers(buffer, header) };
  const page = createPage(model);
  document.getElementById('subtitle').textContent = [header.subtitle, header.model,
    `${header.image_size[1]} × ${header.image_size[0]} px`, `${model.layers.length} attention layers`].filter(Boolean).join(' · ');
  page.elements.rung.textContent = `Level of detail ${header.rung.number} of ${header.rung.of}: ${header.rung.says}`;
  buildClasses(page);
  buildMethods(page);
  buildSettings(page);
  buildStrip(page);
  buildHelp(page);
  buildMethodsTab(page);
  listen(page);
  render(page);
  window.api = createApi(page);
  window.api.startTime = performance.now() - begin;
  document.documentElement.dataset.ready = 'true';
  // Fused matrices for the first rollout, while nobody waits for them.
  const warm = () => evaluate(model, { ...startState(model), method: 'rollout' }, page.first.query);
  if (window.requestIdleCallback) requestIdleCallback(warm); else setTimeout(warm, 200);
}

start().catch((error) => {
  document.body.prepend(make('p', { class: 'failure', role: 'alert', text: `This page could not be opened: ${error.message}` }));
  throw error;
});
