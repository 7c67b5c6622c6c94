// Messages on the page.

const messageNodes = new WeakMap(); // by message
const nodeMessages = new WeakMap(); // by node
const failureNodes = new WeakMap(); // by failure, so that each is read aloud once
const UNANSWERED = { message: "This message has no answer yet.", retry: true };
const NUMBER = new Intl.NumberFormat("en");

/** Show a conversation's messages. Nodes of messages that were there stay in their place. */
function showMessages(conversation, streaming) {
  const log = find("log");
  const { messages } = conversation;
  messages.forEach((message, i) => {
    const node = nodeOf(message);
    const last = i === messages.length - 1;
    showMessage(message, streaming && last);
    node.querySelector(".edit").hidden = message.role !== "user" || streaming;
    node.querySelector(".again").hidden = message.role === "user" || streaming || !last;
  });
  const unanswered = messages.at(-1)?.role === "user" && !streaming;
  const failure = conversation.failure ?? (unanswered ? UNANSWERED : null);
  const nodes = [...messages.map(nodeOf), ...(failure ? [failureNode(failure)] : [])];
  nodes.forEach((node, i) => {
    if (log.children[i] !== node) log.insertBefore(node, log.children[i] ?? null);
  });
  while (log.children.length > nodes.length) log.lastChild.remove();
  find("empty").hidden = messages.length > 0;
}

function nodeOf(message) {
  let node = messageNodes.get(message);
  if (!node) {
    node = fromTemplate("message");
    node.classList.add(message.role);
    node.querySelector("h2").textContent = message.role === "user" ? "You" : "Model";
    messageNodes.set(message, node);
    nodeMessages.set(node, message);
  }
  return node;
}

/** Show what a message has by now. */
function showMessage(message, streaming) {
  const node = nodeOf(message);
  const content = node.querySelector(".content");
  const note = node.querySelector(".note");
  if (message.role === "user") {
    if (content.textContent !== message.content) content.textContent = message.content;
    return;
  }
  node.setAttribute("aria-busy", String(streaming));
  node.classList.toggle("waiting", streaming && !message.content);
  showThought(node.querySelector(".thought"), message, streaming);
  if (message.json)
    content.replaceChildren(codeBlock(streaming ? message.content : indented(message.content), "json"));
  else {
    content.classList.add("prose");
    showMarkdown(content, message.content);
  }
  note.hidden = !message.note || streaming;
  note.textContent = message.note;
  node.querySelector(".stats").textContent = statsText(message.stats);
  node.querySelector(".under").hidden = streaming;
}

function showThought(thought, { reasoning, content, seconds }, streaming) {
  thought.hidden = !reasoning;
  if (!reasoning) return;
  const took = seconds < 0.1 ? "Thoughts" : `Thought for ${rounded(seconds)} s`;
  thought.querySelector("summary").textContent = streaming && !content ? "Thinking…" : took;
  showMarkdown(thought.querySelector("div"), reasoning);
}

/** JSON with line breaks; a text that is none, as an answer that was cut, as it is. */
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

const rounded = (number) =>
  number >= 10 ? NUMBER.format(Math.round(number)) : number.toFixed(number < 1 ? 2 : 1);

/** What an answer took, of the numbers that the server gave. */
function statsText({ tokens, speed, wait, prompt, cached }) {
  const parts = [];
  if (tokens !== undefined) parts.push(`${NUMBER.format(tokens)} tokens`);
  if (speed) parts.push(`${rounded(speed)} tokens/s`);
  if (wait !== undefined) parts.push(`first after ${rounded(wait)} s`);
  if (prompt !== undefined)
    parts.push(`prompt ${NUMBER.format(prompt)}, ${NUMBER.format(cached ?? 0)} of it cached`);
  return parts.join(" · ");
}

function failureNode(failure) {
  let node = failureNodes.get(failure);
  if (node) return node;
  const { message, retry, field } = failure;
  node = fromTemplate("failure");
  failureNodes.set(failure, node);
  if (failure !== UNANSWERED) node.setAttribute("role", "alert");
  node.querySelector("p").textContent = message;
  const button = node.querySelector("button");
  if (field && FIELDS.includes(fieldOf(field))) {
    button.className = "open-field";
    button.dataset.field = fieldOf(field);
    button.textContent = "Open settings";
  } else button.hidden = !retry;
  return node;
}

/** The setting that makes a field of a request. */
const fieldOf = (name) => ({ response_format: "schema" })[name] ?? name;

/** Turn a user's message into a form. send: called with the new text. */
function editMessage(message, after, send) {
  const node = nodeOf(message);
  const form = fromTemplate("editor");
  const area = form.querySelector("textarea");
  const close = () => {
    form.remove();
    node.classList.remove("editing");
    node.querySelector(".edit").focus();
  };
  area.value = message.content;
  form.querySelector("p").textContent = after > 1 ? `Sending it drops the ${after} messages after it.` : "";
  form.querySelector(".cancel").addEventListener("click", close);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!area.value.trim()) return;
    close();
    send(area.value.trim());
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
    } else if (isSend(event)) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  node.classList.add("editing");
  node.append(form);
  fit(area);
  area.addEventListener("input", () => fit(area));
  area.focus();
}

/** Whether a key sends what is typed: Enter, but for one that ends a word of an input method. On a screen's
 * keyboard, which has no Shift+Enter, it begins a line. */
const isSend = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && hasKeyboard();

/** Make a text area as high as its text. */
function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}
