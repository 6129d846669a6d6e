// Puts the page together: photo, answers, explorers, steps, history.

const MOST = 24;
const get = (id) => document.getElementById(id);
const live = { models: [], limits: null, entry: null, history: [], asking: null, tab: 'explorer', open: { at: 0 }, board: null, runs: 0 };

const aboutOf = (name) => live.models.find((model) => model.name === name);
const chosen = () => [...new Set([get('first').value, get('second').value].filter(Boolean))];

function take(blob, name) {
  if (blob.size > live.limits.megabytes * 1e6) {
    notice(`${name} has ${(blob.size / 1e6).toFixed(1)} MB; this server takes ${live.limits.megabytes} MB.`);
    return;
  }
  const entry = { blob, name, changes: [], follow: null, base: {}, answers: {}, images: {}, url: URL.createObjectURL(blob) };
  live.history.unshift(entry);
  for (const old of live.history.splice(MOST)) URL.revokeObjectURL(old.url);
  show(entry);
}

function show(entry) {
  live.entry = entry;
  get('file-name').textContent = entry.name;
  get('empty').hidden = true;
  get('whatif').hidden = false;
  get('views').hidden = false;
  run();
}

// Ask all chosen models. What is still being asked for an earlier state is dropped.
async function run() {
  const { entry } = live;
  if (!entry) return;
  if (live.asking) live.asking.abort();
  const asking = new AbortController();
  live.asking = asking;
  drawHistory();
  drawNote();
  const names = chosen();
  get('answers').classList.add('busy');
  get('explorer').classList.add('busy');
  const failed = (error) => { if (error.name !== 'AbortError') notice(error.message); };
  try {
    await Promise.all(names.map((name) => predict(entry, name, asking.signal)));
    if (live.asking !== asking) return;
    drawAnswers();
    drawHistory();
    await (live.tab === 'explorer' ? explore(entry, names, asking) : walk(entry, names, asking));
  } catch (error) { failed(error); }
  if (live.asking !== asking) return;
  get('answers').classList.remove('busy');
  get('explorer').classList.remove('busy');
  live.runs += 1;
  document.documentElement.dataset.runs = String(live.runs);
}

async function predict(entry, name, signal) {
  if (!aboutOf(name).classes.length) { entry.answers[name] = { top: [], said: 'This model has no head, and so no classes.' }; return; }
  try {
    const answer = await (await ask(to('predict', name), question(entry), signal)).json();
    entry.answers[name] = answer;
    if (!entry.changes.length) entry.base[name] = Object.fromEntries(answer.top.map((each) => [each.label, each.probability]));
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    entry.answers[name] = { top: [], said: error.message };
  }
}

async function explore(entry, names, asking) {
  const box = get('explorer');
  box.classList.toggle('two', names.length > 1);
  const before = Object.fromEntries(Array.from(box.querySelectorAll('iframe'), (frame) => [frame.dataset.model, frame]));
  const pages = await Promise.all(names.map(async (name) => {
    try {
      return { name, page: await (await ask(to('explore', name), question(entry), asking.signal)).blob() };
    } catch (error) {
      if (error.name === 'AbortError') throw error;
      return { name, said: error.message };
    }
  }));
  if (live.asking !== asking) return;
  entry.pages = Object.fromEntries(pages.map(({ name, page }) => [name, page]));
  const states = Object.fromEntries(Object.entries(before).map(([name, frame]) => [name, frame.contentWindow.api && frame.contentWindow.api.state()]));
  const frames = pages.map((each) => frameOf(each, states[each.name]));
  box.replaceChildren(...frames.map(({ node }) => node));
  const images = await Promise.all(frames.map(({ ready }) => ready));
  if (live.asking !== asking) return;
  const fallback = images.find(Boolean) || await photo(entry.url);
  names.forEach((name, i) => { entry.images[name] = images[i] || fallback; });
  drawBoardOf(entry, names[0]);
  drawAnswers();
}

// The explorer in a frame, with the view that it had; its image is what the model sees.
function frameOf({ name, page, said }, state) {
  if (!page) return { node: make('p', { class: 'quiet', text: `${name}: ${said}` }), ready: Promise.resolve(null) };
  const url = URL.createObjectURL(page);
  const frame = make('iframe', { src: url, title: `Explorer of ${name}`, 'data-model': name });
  const ready = new Promise((done) => {
    frame.addEventListener('load', async () => {
      const inside = frame.contentDocument;
      while (!inside.documentElement.dataset.ready) await new Promise((next) => { setTimeout(next, 20); });
      inside.getElementById('link').hidden = true;
      const theme = document.documentElement.dataset.theme;
      frame.contentWindow.api.set({ ...(state || {}), theme });
      new ResizeObserver(() => fit(frame)).observe(inside.body);
      URL.revokeObjectURL(url);
      done(await photo(inside.getElementById('source').src));
    }, { once: true });
  });
  return { node: frame, ready };
}

function fit(frame) {
  const high = Math.ceil(frame.contentDocument.body.getBoundingClientRect().height) + 4;
  if (Math.abs(frame.clientHeight - high) > 8) frame.style.height = `${high}px`;
}

async function photo(url) {
  const image = new Image();
  image.src = url;
  await image.decode();
  return image;
}

async function walk(entry, names, asking) {
  const [row, column] = entry.follow || [0.5, 0.5];
  entry.follow = [row, column];
  const lanes = await Promise.all(names.map(async (name) => {
    try {
      const answer = await (await ask(to('steps', name, { row, column }), question(entry), asking.signal)).json();
      const image = entry.images[name] || await photo(entry.url);
      return stepLane(answer, image, live.open);
    } catch (error) {
      if (error.name === 'AbortError') throw error;
      return make('p', { class: 'quiet', text: `${name}: ${error.message}` });
    }
  }));
  if (live.asking !== asking) return;
  get('steps').classList.toggle('two', names.length > 1);
  get('steps').replaceChildren(...lanes);
  if (live.board.image) live.board.draw();
}

function drawBoardOf(entry, name) {
  const model = aboutOf(name);
  live.board.show(entry.images[name], entry, model.image_size, model.patch);
}

function drawAnswers() {
  const { entry } = live;
  get('answers').replaceChildren(...chosen().map((name) => {
    const answer = entry.answers[name] || { top: [] };
    const model = aboutOf(name);
    const base = entry.changes.length ? entry.base[name] : null;
    const rows = answer.top.map(({ label, probability }) => make('div', { class: 'guess' },
      make('span', { class: 'name', text: label }),
      make('span', { class: 'change', text: base && label in base ? `was ${percent(base[label])}` : '' }),
      make('span', { class: 'value', text: percent(probability) }),
      make('span', { class: 'track' }, bar(probability))));
    const calibrated = model.temperature === 1 ? 'not calibrated' : `calibrated: T = ${number(model.temperature)}`;
    const save = make('button', { class: 'plain', text: 'Save page', title: 'The explorer of this image as one file', onclick: () => savePage(entry, name) });
    save.disabled = !(entry.pages && entry.pages[name]);
    return make('article', { class: 'answer', 'data-model': name }, make('h2', { text: name }),
      make('p', { class: 'quiet small', text: `${model.kind} · ${model.image_size[1]} × ${model.image_size[0]} px · ${(model.parameters / 1e6).toFixed(1)} M parameters · ${calibrated}` }),
      answer.said ? make('p', { text: answer.said, role: 'alert' }) : make('div', { class: 'rows' }, ...rows),
      save);
  }));
}

function bar(share) {
  const node = make('span', { class: 'bar' });
  node.style.width = `${100 * share}%`;
  return node;
}

function savePage(entry, name) {
  const stem = `${entry.name.replace(/\.[^.]*$/, '')}_${name}`.replace(/[^\w-]+/g, '_');
  const link = make('a', { href: URL.createObjectURL(entry.pages[name]), download: `${stem}.html` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function drawHistory() {
  get('history').replaceChildren(...live.history.map((entry) => {
    const answer = entry.answers[chosen()[0]];
    const [best] = answer ? answer.top : [];
    const button = make('button', { class: 'thumb', title: entry.name, onclick: () => show(entry) },
      make('img', { src: entry.url, alt: '' }), make('span', { text: best ? `${best.label} ${percent(best.probability)}` : entry.name }));
    if (entry === live.entry) button.setAttribute('aria-current', 'true');
    return button;
  }));
}

function drawNote() {
  const { changes } = live.entry;
  const moved = changes.filter((change) => change.kind === 'move').length;
  const hidden = changes.length - moved;
  get('whatif-note').textContent = changes.length ? [hidden && `${hidden} hidden`, moved && `${moved} moved`].filter(Boolean).join(', ') : 'What if? Click a cell.';
}

function setChanges(changes) {
  live.entry.changes = changes;
  live.board.draw();
  run();
}

function setTab(tab) {
  live.tab = tab;
  for (const name of ['explorer', 'steps']) {
    get(name).hidden = name !== tab;
    get(`tab-${name}`).setAttribute('aria-selected', String(name === tab));
  }
  run();
}

function setTool(tool) {
  live.board.tool = tool;
  document.querySelectorAll('[data-tool]').forEach((button) => button.setAttribute('aria-checked', String(button.dataset.tool === tool)));
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.querySelectorAll('iframe').forEach((frame) => { if (frame.contentWindow.api) frame.contentWindow.api.set({ theme }); });
}

async function start() {
  setTheme(matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');
  const { models, limits } = await (await ask('model')).json();
  Object.assign(live, { models, limits });
  const options = (first) => [...first, ...models.map(({ name }) => make('option', { value: name, text: name }))];
  get('first').append(...options([]));
  get('second').append(...options([make('option', { value: '', text: 'none' })]));
  get('second-box').hidden = models.length < 2;
  get('about').textContent = models.map((model) => model.name).join(' · ');
  for (const id of ['first', 'second']) get(id).addEventListener('change', run);
  live.board = createCanvas(setChanges, (at) => { live.entry.follow = at; if (live.tab === 'steps') run(); else setTab('steps'); });
  document.querySelectorAll('[data-tool]').forEach((button) => button.addEventListener('click', () => setTool(button.dataset.tool)));
  get('undo').addEventListener('click', () => setChanges(live.entry.changes.slice(0, -1)));
  get('reset').addEventListener('click', () => setChanges([]));
  get('theme').addEventListener('click', () => setTheme(document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark'));
  for (const tab of ['explorer', 'steps']) get(`tab-${tab}`).addEventListener('click', () => setTab(tab));
  listenForPhotos(take);
  window.live = { changes: () => structuredClone(live.entry.changes), answers: () => structuredClone(live.entry.answers) };
  document.documentElement.dataset.ready = 'true';
}

start().catch((error) => {
  document.body.prepend(make('p', { class: 'failure', role: 'alert', text: `This server did not answer: ${error.message}` }));
});
