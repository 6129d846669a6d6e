// Questions to the server. The token follows # in the address, which a browser never sends.

const TOKEN = new URLSearchParams(location.hash.slice(1)).get('token');

async function ask(path, body, signal) {
  const headers = TOKEN ? { Authorization: `Bearer ${TOKEN}` } : {};
  const answer = await fetch(path, { method: body ? 'POST' : 'GET', body, headers, signal });
  if (answer.ok) return answer;
  let detail = `${answer.status} ${answer.statusText}`;
  try {
    const said = (await answer.json()).detail;
    detail = typeof said === 'string' ? said : JSON.stringify(said);
  } catch { /* the status has to do */ }
  throw new Error(detail);
}

// The image and its changes as a form.
function question(entry) {
  const form = new FormData();
  form.append('file', entry.blob, entry.name);
  form.append('changes', JSON.stringify(entry.changes));
  return form;
}

const to = (path, model, more = {}) => `${path}?${new URLSearchParams({ model, ...more })}`;

function notice(text) {
  const box = document.getElementById('notice');
  box.textContent = text;
  box.hidden = false;
  clearTimeout(box.timer);
  box.timer = setTimeout(() => { box.hidden = true; }, 6000);
}
