// Pointer and keyboard, and the functions that tests call.

function pixelAt(page, event) {
  const box = page.elements.image.getBoundingClientRect();
  const [height, width] = page.model.header.image_size;
  const pixel = [(event.clientY - box.top) / page.scale, (event.clientX - box.left) / page.scale];
  return pixel[0] >= 0 && pixel[1] >= 0 && pixel[0] < height && pixel[1] < width ? pixel : null;
}

// The middle of the finest cell, so that equal cells are equal queries.
function pixelQuery(page, pixel) {
  const { layout } = page.model.layers[0];
  const cell = cellAt(layout, pixel);
  const size = page.model.header.image_size;
  return { kind: 'pixel', at: cell.map((at, axis) => Math.min(size[axis] - 0.5, (at + 0.5) * layout.stride[axis])) };
}

const sameQuery = (one, other) => writeQuery(one) === writeQuery(other);

function pointed(page, event) {
  const pixel = pixelAt(page, event);
  if (!pixel) { left(page); return; }
  const { state } = page;
  const query = pixelQuery(page, pixel);
  const still = page.key && String(page.key) === String(query.at);
  page.key = query.at;
  if (still) return;
  if (!state.pinned && methodOf(state.method).query) page.update({ query });
  else schedule(page);
}

function left(page) {
  page.key = null;
  if (page.state.pinned) schedule(page);
  else page.update({ query: page.first.query });
}

// The first click pins, the second compares, the third pins anew; on a pinned cell it lets go.
function clicked(page, event) {
  const pixel = pixelAt(page, event);
  const { state } = page;
  if (!pixel || !methodOf(state.method).query) return;
  const query = pixelQuery(page, pixel);
  if (!state.pinned || state.other) page.update({ query, pinned: true, other: null });
  else if (sameQuery(state.query, query)) page.update({ pinned: false });
  else page.update({ other: query });
}

function tileAt(page, event) {
  const area = page.elements.tiles.getBoundingClientRect();
  const [x, y] = [event.clientX - area.left, event.clientY - area.top];
  return page.tiles.boxes.find((box) => x >= box.x && x <= box.x + box.wide && y >= box.y && y <= box.y + box.high);
}

function toggleMute(page, layer, head) {
  if (head === 'fused' || !page.model.layers[layer].perHead) {
    notice(page, head === 'fused' ? 'Choose a single head to mute it.' : 'This page does not keep single heads.');
    return;
  }
  const heads = page.state.muted[layer] || [];
  const muted = heads.includes(head) ? heads.filter((other) => other !== head) : [...heads, head].sort((a, b) => a - b);
  page.update({ muted: { ...page.state.muted, [layer]: muted } });
}

function moveHead(page, step) {
  const { state, model } = page;
  const heads = model.layers[state.layer].heads;
  const at = state.head === 'fused' ? 0 : state.head + 1;
  const next = (at + step + heads + 1) % (heads + 1);
  page.update({ head: next === 0 ? 'fused' : next - 1 });
}

function moveQuery(page, rows, columns) {
  const { state, model } = page;
  const layout = page.queryLayout();
  const from = state.query.kind === 'pixel' ? cellAt(layout, state.query.at) : layout.grid.map((size) => size >> 1);
  const cell = [from[0] + rows, from[1] + columns].map((at, axis) => Math.max(0, Math.min(layout.grid[axis] - 1, at)));
  const size = model.header.image_size;
  const middle = cell.map((at, axis) => Math.min(size[axis] - 0.5, (at + 0.5) * layout.stride[axis]));
  page.update({ query: pixelQuery(page, middle), pinned: true });
}

function keyPressed(page, event) {
  const { state, model, elements } = page;
  const typing = ['SELECT', 'INPUT', 'TEXTAREA'].includes(event.target.tagName);
  if (event.ctrlKey || event.metaKey || event.altKey || elements.help.open) return;
  if (typing && (event.key.startsWith('Arrow') || event.key === ' ' || event.key.length === 1)) return;
  if (event.target.tagName === 'BUTTON' && (event.key === ' ' || event.key === 'Enter')) return;
  const arrows = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const arrow = arrows[event.key];
  const next = (list, value) => list[(list.indexOf(value) + 1) % list.length];
  const actions = {
    ' ': () => page.update({ overlay: !state.overlay }),
    Enter: () => page.update(state.pinned ? { pinned: false, other: null } : { pinned: true }),
    Escape: () => page.update({ pinned: false, other: null, query: page.first.query }),
    r: () => page.update({ method: state.method === 'rollout' ? 'attention' : 'rollout' }),
    d: () => page.update({ direction: next(['row', 'column'], state.direction) }),
    c: () => page.update({ klass: (state.klass + 1) % Math.max(1, model.header.classes.length) }),
    m: () => toggleMute(page, state.layer, state.head),
    w: () => page.update({ outlines: !state.outlines }),
    s: () => saveImage(page),
    u: () => copyLink(page),
    t: () => page.update({ theme: document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark' }),
    '?': () => elements.help.showModal(),
  };
  const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (arrow && event.shiftKey) moveQuery(page, ...arrow);
  else if (arrow && arrow[1]) moveHead(page, arrow[1]);
  // The last layer is lowest in the matrix, so down means deeper.
  else if (arrow) page.update({ layer: Math.max(0, Math.min(model.layers.length - 1, state.layer + arrow[0])) });
  else if (action) action();
  else return;
  event.preventDefault();
}

function listen(page) {
  const { elements } = page;
  elements.image.addEventListener('pointermove', (event) => pointed(page, event));
  elements.image.addEventListener('pointerleave', () => left(page));
  elements.image.addEventListener('click', (event) => clicked(page, event));
  elements.tiles.addEventListener('click', (event) => {
    const box = tileAt(page, event);
    if (!box) return;
    if (event.shiftKey) toggleMute(page, box.layer.number, box.head);
    else page.update({ layer: box.layer.number, head: box.head, method: 'attention' });
  });
  elements.tiles.addEventListener('pointermove', (event) => {
    const box = tileAt(page, event);
    elements.tiles.title = box ? `layer ${layerName(box.layer)}, ${headName(box.head, page.state.fusion)}` : '';
  });
  document.addEventListener('keydown', (event) => keyPressed(page, event));
  const resized = () => {
    page.measured = null;
    page.tiles = null;
    schedule(page);
  };
  window.addEventListener('resize', resized);
  new ResizeObserver(resized).observe(elements.explore);
  window.addEventListener('hashchange', () => {
    const hash = location.hash.replace(/^#/, '');
    if (hash === page.written) return;
    page.state = readHash(hash, page.model);
    schedule(page);
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => schedule(page));
  for (const tab of ['explore', 'methods']) {
    document.getElementById(`tab-${tab}`).addEventListener('click', () => page.update({ tab }));
  }
  const press = (id, action) => document.getElementById(id).addEventListener('click', action);
  press('save', () => saveImage(page));
  press('link', () => copyLink(page));
  press('theme', () => page.update({ theme: document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark' }));
  press('help-open', () => elements.help.showModal());
}

// The numbers behind the page. Queries: {kind: 'pool'}, {kind: 'prefix', token}, {kind: 'cell', at}.
function createApi(page) {
  const { model } = page;
  const settings = (given) => ({ ...startState(model), ...given });
  const plain = (result) => (result ? { ...result, values: Array.from(result.values), layout: undefined, grid: result.layout.grid } : null);
  return {
    state: () => structuredClone(page.state),
    set: (patch) => { page.update(patch); render(page); },
    evaluate: (given, query) => plain(evaluate(model, sound(settings(given), model), query)),
    masked: (layer, cell) => {
      const { layout } = model.layers[layer];
      return windowCells(layout, tokenOf(layout, cell), false).map((token) => cellOf(layout, token));
    },
    reach: (layer, cell) => {
      const { layout } = model.layers[layer];
      return windowCells(layout, tokenOf(layout, cell), true).map((token) => cellOf(layout, token));
    },
    lineage: (pixel) => lineage(page, pixel).map(({ cell }) => cell),
    shown: () => (page.shown ? { ...page.shown, layout: undefined, grid: page.shown.layout.grid, cells: Array.from(page.shown.cells) } : null),
    pixelOnScreen: (pixel) => {
      const box = page.elements.image.getBoundingClientRect();
      return [box.left + pixel[1] * page.scale, box.top + pixel[0] * page.scale];
    },
    tileOnScreen: (layer, head) => {
      const area = page.elements.tiles.getBoundingClientRect();
      const box = page.tiles.boxes.find((other) => other.layer.number === layer && other.head === head);
      return [area.left + box.x + box.wide / 2, area.top + box.y + box.high / 2];
    },
    // Milliseconds for each of many hovers, drawing included.
    hoverTimes: (count) => {
      const [height, width] = model.header.image_size;
      return Array.from({ length: count }, (_, i) => {
        const at = [((i * 37) % 97 / 97) * height, ((i * 61) % 89 / 89) * width];
        const begin = performance.now();
        page.state = sound({ ...page.state, query: pixelQuery(page, at) }, model);
        render(page);
        return performance.now() - begin;
      });
    },
    header: model.header,
  };
}
