// Elements and numbers, as every page writes them.

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === 'class') node.className = value;
    else if (name === 'text') node.textContent = value;
    else if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function number(value) {
  if (value === 0) return '0';
  const size = Math.abs(value);
  const text = size < 0.0001 || size >= 10000 ? size.toExponential(1) : String(Number(size.toPrecision(size < 1 ? 2 : 3)));
  return value < 0 ? `−${text}` : text;
}

const percent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0)} %`;
