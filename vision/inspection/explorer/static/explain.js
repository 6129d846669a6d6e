// The tab on methods and trust, and the help.

const KEYS = [
  ['← →', 'previous or next head'], ['↑ ↓', 'previous or next layer'],
  ['Shift + arrows', 'move the query by one cell'], ['Enter', 'pin or release the query'],
  ['Click', 'pin; a second click compares two queries'], ['Escape', 'back to the pooled output'],
  ['Space', 'map over the image on or off'], ['R', 'attention or rollout'],
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
    make('p', { class: 'quiet', text: 'Move the pointer over the image: the cell under it becomes the query and every small map redraws. Click a small map to enlarge it; Shift and click mutes its head.' }),
    close);
}

function buildMethodsTab(page) {
  const { model, elements } = page;
  const { header } = model;
  const root = elements.methodsTab;
  const cards = METHODS.filter((method) => isAvailable(method, model)).map((method) => make('article', { class: 'card' },
    make('h3', { text: method.title }),
    make('p', { class: 'formula', text: method.formula }),
    make('p', { text: method.notes }),
    make('p', { class: 'quiet small', text: method.reference }),
    make('button', { class: 'plain', text: 'Show it', onclick: () => page.update({ method: method.id, tab: 'explore' }) })));
  const missing = METHODS.filter((method) => !isAvailable(method, model));
  root.append(
    make('section', { class: 'prose' },
      make('h2', { text: 'Can these maps be believed?' }),
      make('p', { text: 'A map of attention shows where information may have flowed, not why the model decided. Compare a method with the random and the centre baseline before you draw a conclusion from it, and prefer conclusions that several methods support.' })),
    make('section', {}, make('h2', { text: 'Scores on this image' }), ...scoreSection(header)),
    make('section', {}, make('h2', { text: 'Methods' }), make('div', { class: 'cards' }, ...cards)),
    make('section', { class: 'prose' },
      make('h2', { text: 'What this page keeps' }),
      make('p', { text: `Level of detail ${header.rung.number} of ${header.rung.of}: ${header.rung.says} No weight has an error above ${number(header.largest_error)}. Sums and rollouts are computed here, from these weights.` }),
      ...(missing.length ? [make('p', { text: `Not available for this model or on this rung: ${missing.map((method) => method.title).join(', ')}.` })] : [])));
}

const COLUMNS = {
  pointing: 'whether the largest value lies on the object (of several, their share on it)',
  energy: 'the share of the map that lies on the object',
  pixel_accuracy: 'pixels on the right side where the map is cut at its mean',
  map: 'average precision of the pixels, object and background together',
  miou: 'intersection over union of the map cut at its mean, mean of object and background',
  positive: 'how long the prediction stays when the map’s strongest pixels are hidden first (area, 0 to 90)',
  negative: 'how long the prediction stays when its weakest pixels are hidden first (area, 0 to 90)',
  deletion: 'the mean probability of the class while the strongest pixels are hidden',
  insertion: 'the mean probability of the class while the strongest pixels come back into a blurred image',
};

// The scores of this image with their meaning.
function scoreSection({ scores, scores_note: said, metrics }) {
  const note = said ? [make('p', { class: 'quiet', id: 'scores-note', text: said })] : [];
  if (!Object.keys(scores).length) {
    return [make('p', { text: 'No method was scored on this image.' }), ...note];
  }
  const known = Object.keys(metrics).filter((metric) => metric in COLUMNS);
  const meaning = known.length ? [make('details', {}, make('summary', { text: 'Meaning of the columns' }),
    make('dl', { class: 'columns' }, ...known.map((metric) => make('div', {},
      make('dt', { text: metrics[metric] }), make('dd', { text: COLUMNS[metric] })))))] : [];
  return [
    make('p', { class: 'prose', text: 'In percent; arrows point to the better direction. Maps of a class explain the most probable one, with the settings that this page starts with. One image proves little: a method below the baselines here may be above them on other images.' }),
    scoreTable(scores, metrics), ...meaning, ...note];
}

function scoreTable(scores, titles) {
  const methods = Object.keys(scores);
  const metrics = [...new Set(methods.flatMap((method) => Object.keys(scores[method])))];
  const baseline = (method) => ['random', 'centre'].includes(method);
  const name = (id) => (methodOf(id) ? methodOf(id).title : id);
  const ordered = [...methods.filter((method) => !baseline(method)), ...methods.filter(baseline)];
  return make('div', { class: 'table-box' }, make('table', {},
    make('thead', {}, make('tr', {}, make('th', { scope: 'col', text: 'Method' }),
      ...metrics.map((metric) => make('th', { scope: 'col', text: titles[metric] || metric })))),
    make('tbody', {}, ...ordered.map((method) => make('tr', { class: baseline(method) ? 'baseline' : '' },
      make('th', { scope: 'row', text: baseline(method) ? `${name(method)} (baseline)` : name(method) }),
      ...metrics.map((metric) => make('td', { text: metric in scores[method] ? number(scores[method][metric]) : '–' })))))));
}
