"use strict";
// Small helpers: elements, numbers as text, colours.

function element(tag, attributes, ...children) {
  const svg = ["svg", "g", "rect", "line", "circle", "text", "title", "path"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const byId = (id) => document.getElementById(id);
const percent = (share, digits = 1) => (share === null || share === undefined ? "–" : (100 * share).toFixed(digits) + "\u00a0%");
const decimal = (value, digits = 4) => (value === null || value === undefined ? "–" : value.toFixed(digits));
const whole = (value) => value.toLocaleString("en-US");
const signed = (value, digits) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits);

function large(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, unit] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]]) {
    if (value >= size) return (value / size).toPrecision(3) + unit;
  }
  return String(Math.round(value));
}

function theme(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function rgb(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

// Between two colours; the root makes small shares visible.
function blend(from, to, share) {
  const weight = Math.sqrt(Math.min(1, Math.max(0, share)));
  return `rgb(${from.map((low, i) => Math.round(low + (to[i] - low) * weight)).join(",")})`;
}
