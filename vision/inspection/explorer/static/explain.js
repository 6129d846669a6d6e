// The tab on methods and trust, and the help.

const KEYS = [
  ['← →', 'previous or next head'], ['↑ ↓', 'previous or next layer'],
  ['Shift + arrows', 'move the query by one cell'], ['Enter', 'pin the query, or let it go'],
  ['Click', 'pin; a second click compares two queries'], ['Escape', 'back to the pooled output'],
  ['Space', 'map over the picture on or off'], ['R', 'attention or rollout'],
  ['D', 'where it looks, or who looks at it'], ['C', 'next class'], ['M', 'mute the chosen head'],
  ['W', 'windows, masks and lineage'], ['S', 'save this view as PNG'], ['U', 'copy a link to this view'],
  ['T', 'light or dark'], ['?', 'this help'],
];

function buildHelp(page) {
  const { help } = page.elements;
  const close = make('button', { text: 'Close', onclick: () => help.close() });
  help.append(
    make('h2', { id: 'help-title', text: 'Keys' }),
    make('dl', { class: 'keys' }, ...KEYS.map(([key, text]) => make('div', {},
      make('dt', {}, make('kbd', { text: key })), make('dd', { text })))),
    make('p', { class: 'quiet', text: 'Move the pointer over the picture: the cell under it becomes the query and every small map redraws. Click a small map to enlarge it; Shift and click mutes its head.' }),
    close);
}

function buildMethodsTab(page) {
  const { model, elements } = page;
  const { header } = model;
  const root = elements.methodsTab;
  const cards = METHODS.filter((method) => method.has(model)).map((method) => make('article', { class: 'card' },
    make('h3', { text: method.name }),
    make('p', { class: 'formula', text: method.formula }),
    make('p', { text: method.text.join(' ') }),
    make('p', { class: 'quiet small', text: method.source }),
    make('button', { class: 'plain', text: 'Show it', onclick: () => page.update({ method: method.id, tab: 'explore' }) })));
  const missing = METHODS.filter((method) => !method.has(model));
  root.append(
    make('section', { class: 'prose' },
      make('h2', { text: 'Can these maps be believed?' }),
      make('p', { text: 'A map of attention says where information may have flowed, not why the model decided. Compare a method with the random and the centre baseline before you draw a conclusion from it, and prefer statements that several methods agree on.' })),
    make('section', {}, make('h2', { text: 'Scores on this picture' }), scoreTable(header.scores)),
    make('section', {}, make('h2', { text: 'Methods' }), make('div', { class: 'cards' }, ...cards)),
    make('section', { class: 'prose' },
      make('h2', { text: 'What this page keeps' }),
      make('p', { text: `Rung ${header.rung.number} of ${header.rung.of}: ${header.rung.says} No weight is off by more than ${number(header.largest_error)}. Sums and rollouts are computed here, from these weights.` }),
      ...(missing.length ? [make('p', { text: `Not available for this model or on this rung: ${missing.map((method) => method.name).join(', ')}.` })] : [])));
}

function scoreTable(scores) {
  const methods = Object.keys(scores);
  if (!methods.length) return make('p', { class: 'quiet', text: 'No scores were computed for this picture.' });
  const metrics = [...new Set(methods.flatMap((method) => Object.keys(scores[method])))];
  const baseline = (method) => ['random', 'centre'].includes(method);
  const name = (id) => (methodOf(id) ? methodOf(id).name : id);
  const ordered = [...methods.filter((method) => !baseline(method)), ...methods.filter(baseline)];
  return make('div', { class: 'table-box' }, make('table', {},
    make('thead', {}, make('tr', {}, make('th', { scope: 'col', text: 'Method' }),
      ...metrics.map((metric) => make('th', { scope: 'col', text: metric })))),
    make('tbody', {}, ...ordered.map((method) => make('tr', { class: baseline(method) ? 'baseline' : '' },
      make('th', { scope: 'row', text: baseline(method) ? `${name(method)} (baseline)` : name(method) }),
      ...metrics.map((metric) => make('td', { text: metric in scores[method] ? number(scores[method][metric]) : '–' })))))));
}
