// One patch through the model, step by step, with its numbers.

function stepCanvas(image, grid) {
  const canvas = make('canvas', { role: 'img', 'aria-label': 'The cells of this step over the image' });
  const scale = Math.min(320 / Math.max(image.naturalWidth, image.naturalHeight), 12);
  const [wide, high] = [image.naturalWidth * scale, image.naturalHeight * scale];
  canvas.width = Math.round(wide);
  canvas.height = Math.round(high);
  const context = canvas.getContext('2d');
  context.imageSmoothingEnabled = false;
  context.drawImage(image, 0, 0, wide, high);
  const [rows, columns] = grid.grid;
  const [tall, broad] = [grid.stride[0] * high, grid.stride[1] * wide];
  const cells = Array.from({ length: rows * columns }, (_, i) => [Math.floor(i / columns), i % columns]);
  const box = ([row, column]) => [column * broad, row * tall, broad, tall];
  if (grid.values) {
    const largest = Math.max(...grid.values, 1e-12);
    cells.forEach((cell, i) => {
      context.fillStyle = `rgb(12 12 30 / ${0.82 * (1 - grid.values[i] / largest)})`;
      context.fillRect(...box(cell));
    });
  }
  if (rows * columns <= 1024) {
    context.strokeStyle = 'rgb(128 128 128 / 50%)';
    cells.forEach((cell) => context.strokeRect(...box(cell)));
  }
  if (grid.masked) {
    context.fillStyle = 'rgb(200 40 40 / 45%)';
    grid.masked.forEach((cell) => context.fillRect(...box(cells[cell])));
  }
  if (grid.groups) outline(context, grid, tall, broad);
  context.lineWidth = 3;
  context.strokeStyle = '#ffb000';
  context.strokeRect(...box(grid.chosen));
  return canvas;
}

// Lines between cells of different windows.
function outline(context, { grid, groups }, tall, broad) {
  const [rows, columns] = grid;
  context.strokeStyle = '#2fd8e6';
  context.lineWidth = 2;
  context.beginPath();
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const own = groups[row * columns + column];
      if (column + 1 < columns && groups[row * columns + column + 1] !== own) {
        context.moveTo((column + 1) * broad, row * tall);
        context.lineTo((column + 1) * broad, (row + 1) * tall);
      }
      if (row + 1 < rows && groups[(row + 1) * columns + column] !== own) {
        context.moveTo(column * broad, (row + 1) * tall);
        context.lineTo((column + 1) * broad, (row + 1) * tall);
      }
    }
  }
  context.stroke();
}

function vectorText(vector) {
  const more = vector.width > vector.first.length ? ', …' : '';
  return make('p', { class: 'vector' }, make('b', { text: vector.name }),
    `[${vector.first.map(number).join(', ')}${more}] · ${vector.width} numbers, length ${number(vector.length)}`);
}

function stepTable({ columns, rows }) {
  return make('div', { class: 'table-box' }, make('table', {},
    make('thead', {}, make('tr', {}, ...columns.map((text) => make('th', { scope: 'col', text })))),
    make('tbody', {}, ...rows.map(([name, ...values]) => make('tr', {}, make('th', { scope: 'row', text: name }),
      ...values.map((value) => make('td', { text: number(value) })))))));
}

function stepCard(step, image, place, all) {
  const words = make('div', { class: 'prose' }, make('h3', { text: `${place + 1} of ${all}: ${step.title}` }),
    make('p', { text: step.text }), ...step.vectors.map(vectorText), ...(step.rows ? [stepTable(step)] : []));
  return make('article', { class: `step${step.grid ? '' : ' wordy'}` }, ...(step.grid ? [make('div', {}, stepCanvas(image, step.grid))] : []), words);
}

// A lane for each model: the stations, and the card of the one that is open.
function stepLane(answer, image, open) {
  const lane = make('section', { class: 'lane' }, make('h2', { text: answer.model }));
  const rail = make('div', { class: 'rail', role: 'group', 'aria-label': 'Steps' });
  const place = make('div', {});
  let at = Math.min(open.at, answer.steps.length - 1);
  const go = (next) => {
    at = Math.max(0, Math.min(answer.steps.length - 1, next));
    open.at = at;
    rail.querySelectorAll('[data-step]').forEach((button, i) => (i === at ? button.setAttribute('aria-current', 'step') : button.removeAttribute('aria-current')));
    place.replaceChildren(stepCard(answer.steps[at], image, at, answer.steps.length));
  };
  rail.append(make('button', { text: '←', 'aria-label': 'Previous step', onclick: () => go(at - 1) }),
    ...answer.steps.map((step, i) => make('button', { text: step.title, 'data-step': step.id, onclick: () => go(i) })),
    make('button', { text: '→', 'aria-label': 'Next step', onclick: () => go(at + 1) }));
  lane.append(rail, place);
  go(at);
  return lane;
}
