// Everything around the image: classes, settings, token strip, readout.

function slider(page, { key, label, low, high, step, text, enabled }) {
  const output = make('output', { class: 'value' });
  const input = make('input', {
    type: 'range', min: low, max: high, step, id: `set-${key}`,
    oninput: (event) => page.update({ [key]: Number(event.target.value) }),
  });
  const row = make('label', { class: 'setting', for: `set-${key}` }, make('span', { text: label }), output, input);
  page.controls.push((state) => {
    const value = typeof state[key] === 'number' ? state[key] : low;
    input.value = String(value);
    output.textContent = text ? text(state[key]) : String(state[key]);
    input.setAttribute('aria-valuetext', output.textContent);
    input.disabled = enabled ? !enabled(state) : false;
  });
  return row;
}

function toggle(page, { key, label, read, write }) {
  const input = make('input', {
    type: 'checkbox', id: `set-${key}`,
    onchange: (event) => page.update(write ? write(event.target.checked) : { [key]: event.target.checked }),
  });
  page.controls.push((state) => { input.checked = read ? read(state) : state[key]; });
  return make('label', { class: 'check', for: `set-${key}` }, input, make('span', { text: label }));
}

function choice(page, { key, label, options, read, write }) {
  const input = make('select', {
    id: `set-${key}`,
    onchange: (event) => page.update(write ? write(event.target.value) : { [key]: event.target.value }),
  }, ...options.map(([value, text]) => make('option', { value, text })));
  page.controls.push((state) => { input.value = String(read ? read(state) : state[key]); });
  return make('label', { class: 'setting', for: `set-${key}` }, make('span', { text: label }), input);
}

// A row of settings for some methods only.
function when(page, wanted, ...rows) {
  const group = make('div', { class: 'group' }, ...rows);
  page.controls.push((state) => { group.hidden = !wanted(methodOf(state.method), state); });
  return group;
}

function layerName(layer) {
  if (!layer.layout.windowed) return `${layer.number}`;
  return `${layer.number} · block ${layer.stage}.${layer.block}${layer.layout.shift.some(Boolean) ? ' shifted' : ''}`;
}

const headName = (head, fusion) => (head === 'fused' ? `${fusion} of heads` : `head ${head}`);

function buildSettings(page) {
  const { model, elements } = page;
  const last = model.layers.length - 1;
  const stages = model.layers.filter((layer) => layer.block === 0);
  const layerText = (value) => layerName(model.layers[value]);
  const heads = Math.max(...model.layers.map((layer) => layer.heads));
  const rows = [
    when(page, (method) => method.head,
      ...(stages.length > 1 ? [choice(page, {
        key: 'stage', label: 'Stage',
        options: stages.map((layer) => [layer.stage, `${layer.stage}: cells of ${layer.layout.stride[1]} px`]),
        read: (state) => model.layers[state.layer].stage,
        write: (value) => ({ layer: stages[Number(value)].number }),
      })] : []),
      slider(page, { key: 'layer', label: 'Layer', low: 0, high: last, step: 1, text: layerText }),
      choice(page, {
        key: 'head', label: 'Head', read: (state) => state.head,
        options: [['fused', 'all, fused'], ...Array.from({ length: heads }, (_, head) => [head, `head ${head}`])],
        write: (value) => ({ head: value === 'fused' ? value : Number(value) }),
      })),
    when(page, (method) => method.range,
      when(page, (method) => method.query,
        slider(page, { key: 'end', label: 'From layer', low: 0, high: last, step: 1, text: layerText })),
      slider(page, { key: 'start', label: 'Down to layer', low: 0, high: last, step: 1, text: layerText })),
    when(page, (method) => method.rollout,
      slider(page, {
        key: 'residual', label: 'Residual weight', low: 0, high: 1, step: 0.01,
        text: (value) => (value === 'measured' ? 'measured' : Number(value).toFixed(2)),
        enabled: (state) => state.residual !== 'measured',
      }),
      ...(model.layers.every((layer) => layer.share) ? [toggle(page, {
        key: 'measured', label: 'Residual weight as measured, token by token',
        read: (state) => state.residual === 'measured',
        write: (checked) => ({ residual: checked ? 'measured' : 0.5 }),
      })] : [])),
    when(page, (method) => method.rollout && !method.matrices,
      slider(page, { key: 'discard', label: 'Discard smallest', low: 0, high: 0.95, step: 0.05, text: percent })),
    when(page, (method) => method.head || (method.rollout && !method.matrices),
      choice(page, { key: 'fusion', label: 'Heads fused by', options: model.header.fusions.map((name) => [name, name]) }),
      mutedRow(page)),
  ];
  elements.methodSettings.append(...rows);
  elements.displaySettings.append(
    slider(page, { key: 'opacity', label: 'Opacity', low: 0, high: 1, step: 0.05, text: percent }),
    slider(page, { key: 'mass', label: 'Show the top mass', low: 0.05, high: 1, step: 0.05, text: percent }),
    choice(page, {
      key: 'limit', label: 'Colour limit',
      options: [['max', 'largest value'], ['p99', '99th percentile'], ['fixed', 'fixed']],
    }),
    when(page, (method, state) => state.limit === 'fixed',
      slider(page, { key: 'fixed', label: 'Fixed at', low: 1, high: 50, step: 0.5, text: (value) => `${value} × uniform` })),
    toggle(page, { key: 'overlay', label: 'Map over the image' }),
    toggle(page, { key: 'smooth', label: 'Smooth between cells (looks only)' }),
    toggle(page, { key: 'shared', label: 'One scale for all small maps' }),
    ...(model.layers[0].layout.windowed ? [
      toggle(page, { key: 'outlines', label: 'Windows, masks and lineage' }),
      toggle(page, { key: 'zoom', label: 'Small maps show the query’s window' }),
    ] : []),
  );
}

function mutedRow(page) {
  const text = make('span', {});
  const button = make('button', { class: 'plain', text: 'Unmute all', onclick: () => page.update({ muted: {} }) });
  const row = make('div', { class: 'muted-row' }, text, button);
  page.controls.push((state) => {
    const count = Object.values(state.muted).reduce((sum, heads) => sum + heads.length, 0);
    const able = page.model.layers[0].perHead;
    text.textContent = able ? `Muted heads: ${count || 'none'}` : 'Heads cannot be muted on this rung';
    button.hidden = !count;
  });
  return row;
}

function buildClasses(page) {
  const { model, elements } = page;
  elements.classesBox.hidden = !model.header.classes.length;
  model.header.classes.forEach((entry, klass) => {
    const bar = make('span', { class: 'bar' });
    bar.style.width = `${Math.max(0.5, 100 * entry.probability)}%`;
    const button = make('button', { role: 'radio', class: 'class', onclick: () => page.update({ klass }) },
      make('span', { class: 'name', text: entry.name, title: entry.name }),
      make('span', { class: 'value', text: percent(entry.probability) }),
      make('span', { class: 'track' }, bar));
    page.controls.push((state) => {
      button.setAttribute('aria-checked', String(state.klass === klass));
      button.disabled = !classHas(model, methodOf(state.method), klass);
    });
    elements.classes.append(button);
  });
  const note = make('p', { class: 'quiet small', text: 'This method is independent of the class: the map is the same for all.' });
  page.controls.push((state) => { note.hidden = Boolean(methodOf(state.method).forClass); });
  elements.classes.after(note);
}

function buildMethods(page) {
  const { elements, model } = page;
  for (const method of METHODS.filter((entry) => isAvailable(entry, model))) {
    elements.method.append(make('option', { value: method.id, text: method.title }));
  }
  elements.method.addEventListener('change', (event) => page.update({ method: event.target.value }));
  for (const direction of ['row', 'column']) {
    const button = elements[direction];
    button.addEventListener('click', () => page.update({ direction }));
    page.controls.push((state) => {
      button.setAttribute('aria-checked', String(state.direction === direction));
      button.parentElement.hidden = !methodOf(state.method).direction;
    });
  }
  page.controls.push((state) => { elements.method.value = state.method; });
}

// Queries other than cells, and the other places that take some of the map's mass.
function buildStrip(page) {
  const { model, elements } = page;
  const { layout } = model.layers[0];
  page.strip = [];
  const add = (name, query, token) => {
    const bar = make('span', { class: 'bar' });
    const value = make('span', { class: 'value' });
    const node = make(query ? 'button' : 'div', { class: 'chip' },
      make('span', { class: 'name', text: name.replace('register', 'reg.'), title: name }), value, make('span', { class: 'track' }, bar));
    if (query) node.addEventListener('click', () => page.update({ query, pinned: true, other: null }));
    elements.strip.append(node);
    page.strip.push({ node, bar, value, query, token });
  };
  if (model.header.pool) add('pooled output', { kind: 'pool' }, null);
  layout.prefix.forEach((name, token) => add(name, { kind: 'prefix', token }, token));
  add('cells', null, 'cells');
  if (model.layers.some((layer) => layer.layout.padded)) add('padding', null, 'padding');
}

function syncStrip(page) {
  const { state, result } = page;
  for (const { node, bar, value, query, token } of page.strip) {
    if (query) node.setAttribute('aria-pressed', String(writeQuery(query) === writeQuery(state.query)));
    let share = null;
    if (result && !state.other && (result.unit === 'share' || result.unit === 'weight') && state.direction === 'row') {
      if (token === 'cells') share = cellValues(result).reduce((a, b) => a + b, 0);
      else if (token === 'padding') share = result.padding;
      else if (token !== null && token < result.layout.prefixCount) share = result.values[token];
    }
    value.textContent = share === null ? '' : percent(share);
    bar.style.width = share === null ? '0' : `${100 * Math.min(1, share)}%`;
  }
}

function placeName(page, layout, query) {
  if (query.kind === 'pool') return 'pooled output';
  if (query.kind === 'prefix') return layout.prefix[query.token];
  const [row, column] = cellAt(layout, query.at);
  return `row ${row} · col ${column}`;
}

function lineage(page, pixel) {
  const seen = [];
  page.model.layers.forEach((layer) => {
    if (layer.block === 0) seen.push({ stride: layer.layout.stride, cell: cellAt(layer.layout, pixel) });
  });
  return seen;
}

// The cell of the readout: under the pointer if a query is pinned, else the largest.
function keyCell(page) {
  const { layout, cells } = page.shown;
  if (page.key && (page.state.pinned || !methodOf(page.state.method).query)) return cellAt(layout, page.key);
  let best = 0;
  cells.forEach((value, cell) => { if (Math.abs(value) > Math.abs(cells[best])) best = cell; });
  return cellOf(layout, best + layout.prefixCount);
}

function distance(layout, from, pixel) {
  const centre = from.map((cell, axis) => (cell + 0.5) * layout.stride[axis]);
  return Math.hypot(centre[0] - pixel[0], centre[1] - pixel[1]);
}

function syncReadout(page) {
  const { state, elements, shown, result } = page;
  const method = methodOf(state.method);
  const layout = page.queryLayout();
  const layer = page.model.layers[state.layer];
  const rows = [];
  if (method.head) {
    rows.push(['Layer', String(layer.number)]);
    if (layer.layout.windowed) rows.push(['Stage · block', `${layer.stage} · ${layer.block}${layer.layout.shift.some(Boolean) ? ' shifted' : ''}`]);
    rows.push(['Head', headName(state.head, state.fusion)]);
  }
  if (method.range) rows.push(['Layers', `${method.query ? state.end : page.model.layers.length - 1} down to ${state.start}`]);
  if (method.query) rows.push(['Query', placeName(page, layout, state.query)]);
  if (state.other) rows.push(['Minus', placeName(page, layout, state.other)]);
  if (shown) {
    const cell = keyCell(page);
    const value = shown.cells[cell[0] * shown.layout.grid[1] + cell[1]];
    const pointed = page.key && (state.pinned || !method.query);
    rows.push([pointed ? 'Cell' : 'Largest', `row ${cell[0]} · col ${cell[1]}`]);
    rows.push([{ weight: 'Weight', share: 'Share', length: 'Length', relevance: 'Relevance' }[result.unit], number(value)]);
    if (result.uniform) rows.push(['× uniform', number(value * result.uniform)]);
    if (method.query && state.query.kind === 'pixel') {
      const from = cellAt(layout, state.query.at).map((at, axis) => (at + 0.5) * layout.stride[axis]);
      rows.push(['Distance', `${Math.round(distance(shown.layout, cell, from))} px`]);
    }
  } else rows.push(['Map', 'not stored for this query']);
  if (page.model.layers.some((other) => other.stage) && method.query && state.query.kind === 'pixel') {
    rows.push(['Lineage', lineage(page, state.query.at).map(({ stride, cell }) => `${stride[1]} px (${cell})`).join(' → ')]);
  }
  if (state.method === 'norm') rows.push(['Outliers', String(page.model.header.maps.outliers.length)]);
  elements.readout.replaceChildren(...rows.map(([name, value]) => make('div', { class: name === 'Lineage' ? 'wide' : '' },
    make('dt', { text: name }), make('dd', { text: value }))));
}
