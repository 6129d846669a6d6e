// What the page can show, how it is computed, and what to keep in mind: three sentences each.

const METHODS = [
  {
    id: 'attention', name: 'Attention', short: 'Attention', query: true, direction: true, head: true,
    formula: 'softmax(q·kᵀ / √d)', source: 'Vaswani et al., NeurIPS 2017',
    has: () => true,
    text: [
      'The weights with which one head of one layer mixes the values of other tokens into the query, exactly as the forward pass used them.',
      'It shows a single step: what a token holds in a late layer has been mixed many times before, so a bright cell need not mean that the image mattered there.',
      'Much weight on prefix tokens or on one far cell in every head is often a resting place, not interest.',
    ],
  },
  {
    id: 'rollout', name: 'Rollout', short: 'Rollout', query: true, direction: true, rollout: true,
    formula: 'r ← r · rows(a·A + (1 − a)·I), last layer to first', source: 'Abnar & Zuidema, ACL 2020',
    has: () => true,
    text: [
      'Follows the attention of all layers, and the residual path beside it, from the query down to the patches; in Swin also through shifted windows and merged cells.',
      'It knows no class: two objects in an image share one map, whichever class is asked for.',
      'Values, MLPs and signs are ignored, so it says where information can have come from and not what it did.',
    ],
  },
  {
    id: 'cam_rollout', name: 'CAM-seeded rollout', short: 'CAM-seeded rollout', rollout: true, byClass: true,
    formula: 'rollout of q ∝ (w_c·x̂ − mean_k w_k·x̂)⁺', source: 'exact split of the pooled logit, then rollout',
    has: (model) => model.header.classes.some((entry) => entry.seed),
    text: [
      'The logit of a head on mean-pooled tokens is a sum over cells; the cells that speak for the class start the rollout, which takes them down to the first patches.',
      'It tells classes apart and is as fine as the first layer.',
      'Below the last layer it is a rollout with that method’s limits, and evidence against the class is left out.',
    ],
  },
  {
    id: 'gradient_rollout', name: 'Gradient rollout', short: 'Gradient rollout', query: true, rollout: true, byClass: true, matrices: true,
    formula: 'rollout of rows(mean_h (A ⊙ ∂y/∂A)⁺)', source: 'attention × gradient, cut off at 0 in each head, rows made to sum to 1',
    has: (model) => model.header.classes.some((entry) => entry.matrices),
    text: [
      'A rollout in which each weight counts by how much the logit of the class would change with it, positive parts only.',
      'Heads that do not matter for the class lose their say, which plain rollout cannot do.',
      'Gradients are local: where the model is sure they are small, and rows of almost nothing are scaled up like all others.',
    ],
  },
  {
    id: 'chefer', name: 'Generic attribution', short: 'Generic attribution', query: true, range: true, byClass: true, matrices: true,
    formula: 'R ← R + mean_h (A ⊙ ∂y/∂A)⁺ · R', source: 'Chefer et al., ICCV 2021',
    has: (model) => model.header.classes.some((entry) => entry.matrices),
    text: [
      'Adds up, layer by layer, the positive products of attention and gradient on all ways from the query to a patch.',
      'It needs no choice of a residual weight and separates classes.',
      'Published orderings against rollout change with the model, and without a class token it is weaker: look at the scores.',
    ],
  },
  {
    id: 'cam', name: 'Class activation map', short: 'CAM', byClass: true, map: true,
    formula: '(w_c·x̂_j − mean_k w_k·x̂_j)⁺ / N', source: 'Zhou et al., CVPR 2016',
    has: (model) => model.header.classes.some((entry) => entry.maps.cam),
    text: [
      'The share of the class’s logit that each last token contributes, relative to the mean over classes; together they make up the logit exactly.',
      'It is as coarse as the last layer.',
      'A last token has seen the whole image, so the place of a token need not be the place of what it speaks of.',
    ],
  },
  {
    id: 'token_gradcam', name: 'Grad-CAM on tokens', short: 'Grad-CAM', byClass: true, map: true,
    formula: '(Σ_c mean_j(∂y/∂x_jc) · x_jc)⁺ at the input of the last attention', source: 'Selvaraju et al., ICCV 2017',
    has: (model) => model.header.classes.some((entry) => entry.maps.token_gradcam),
    text: [
      'Channels of the last attention’s input, weighted by their mean gradient over the cells and summed.',
      'Which layer is taken decides the image, more than in convolutional networks.',
      'The mean over cells lets the gradients of different places cancel.',
    ],
  },
  {
    id: 'attention_gradcam', name: 'Grad-CAM on attention', short: 'Attention Grad-CAM', byClass: true, map: true,
    formula: '(mean_h mean_j(∂y/∂A_qj) · A_qj)⁺ of the last layer', source: 'baseline in Chefer et al., CVPR 2021',
    has: (model) => model.header.classes.some((entry) => entry.maps.attention_gradcam),
    text: [
      'The last layer’s heads, weighted by their mean gradient for the class and summed.',
      'It sees one layer only, and in published tests it is among the weakest.',
      'Where all heads have a negative mean gradient it is empty.',
    ],
  },
  {
    id: 'norm', name: 'Norms of the last tokens', short: 'Token norms', map: true,
    formula: '‖x_j‖ before the final norm', source: 'Darcet et al., ICLR 2024',
    has: (model) => Boolean(model.header.maps.norms),
    text: [
      'The length of each cell’s last token before the final norm hides it.',
      'Cells far above the rest (median + 6 deviations; their number is shown) often hold notes on the whole image instead of their patch.',
      'Attention to such cells says little about the place; registers take over their part.',
    ],
  },
];

function methodOf(id) { return METHODS.find((method) => method.id === id); }

// The values of a method by token, with what is needed to read them.
function evaluate(model, state, query) {
  const method = methodOf(state.method);
  const last = model.layers[model.layers.length - 1].layout;
  if (method.map) {
    const packed = state.method === 'norm'
      ? model.header.maps.norms : model.header.classes[state.klass].maps[state.method];
    const cells = view(model.buffer, packed);
    const values = new Float64Array(last.tokens);
    values.set(cells, last.prefixCount);
    return { values, layout: last, unit: state.method === 'norm' ? 'length' : 'relevance', padding: 0 };
  }
  if (state.method === 'attention') return attentionOf(model, state, model.layers[state.layer], state.head, query);
  const range = { ...state, start: state.start, end: state.end };
  if (state.method === 'chefer') {
    const seed = seedOf(model.header, model.layers[state.end].layout, query);
    const values = attribution(model, seed, range, classBy(model, state.klass, false));
    return { values, layout: model.layers[state.start].layout, unit: 'relevance', padding: 0 };
  }
  const matrixOf = state.method === 'gradient_rollout'
    ? classBy(model, state.klass, true) : fusedBy(model, state);
  if (state.method === 'cam_rollout') range.end = model.layers.length - 1;
  return rolloutOf(model, state, range, query, matrixOf);
}

function rolloutOf(model, state, range, query, matrixOf) {
  const top = model.layers[range.end].layout;
  const bottom = model.layers[range.start].layout;
  if (state.method === 'rollout' && state.direction === 'column') {
    const values = rolloutColumn(model, seedOf(model.header, bottom, query), range, matrixOf);
    return { values, layout: top, unit: 'share', padding: 0, uniform: bottom.tokens };
  }
  const seed = state.method === 'cam_rollout'
    ? Float64Array.from(view(model.buffer, model.header.classes[state.klass].seed))
    : seedOf(model.header, top, query);
  return {
    values: rolloutRow(model, seed, range, matrixOf), layout: bottom, unit: 'share', padding: 0,
    uniform: bottom.tokens,
  };
}

// One layer and head; null where the page does not keep that head for this query.
function attentionOf(model, state, layer, head, query) {
  const { layout } = layer;
  const seed = seedOf(model.header, layout, query);
  const result = { layout, unit: 'weight', padding: 0, uniform: keysOf(layout, query) };
  const carry = state.direction === 'row' ? carryRow : carryColumn;
  if (head === 'fused') {
    const matrix = fusedMatrix(model, layer, { ...state, discard: 0 });
    result.values = carry(layout, matrix, 0, seed);
    if (state.direction === 'row' && layout.padded && layer.perHead && state.fusion === 'mean') {
      for (let h = 0; h < layer.heads; h++) result.padding += paddingMass(layer, h * layer.plane, seed) / layer.heads;
    }
    return result;
  }
  if (layer.perHead) {
    result.values = carry(layout, layer.values, head * layer.plane, seed);
    if (state.direction === 'row') result.padding = paddingMass(layer, head * layer.plane, seed);
    return result;
  }
  const prefixOnly = seed.every((share, token) => share === 0 || token < layout.prefixCount);
  if (!layer.headRows || state.direction !== 'row' || !prefixOnly) return null;
  result.values = new Float64Array(layout.tokens);
  for (let token = 0; token < layout.prefixCount; token++) {
    const row = (head * layout.prefixCount + token) * layout.tokens;
    for (let key = 0; key < layout.tokens; key++) result.values[key] += seed[token] * layer.headRows[row + key];
  }
  return result;
}
