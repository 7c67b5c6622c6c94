// The page: the list of conversations, the current one, and what its buttons and keys do.

const conversations = new Map(
  storedIds()
    .map((id) => [id, stored(id)])
    .filter(([, one]) => one),
);
const byTime = () => [...conversations.values()].sort((a, b) => b.updated - a.updated);
const LARGEST_FILE = 16 * 2 ** 20; // bytes, that is imported

let current = conversations.get(location.hash.slice(1)) ?? newConversation(byTime()[0]?.settings);
let model = null; // {id, context_length}, when the server has said it

/** Show the current conversation, all of it. */
function show() {
  const streaming = running.has(current.id);
  document.title = `${current.title} · bonsai-jax`;
  find("title").textContent = current.title;
  showMessages(current, streaming);
  find("send").hidden = streaming;
  find("stop").hidden = !streaming;
  find("export").hidden = current.messages.length === 0;
  showHints();
  showList();
}

/** What is set, and how much of the context is taken. */
function showHints() {
  const set = FIELDS.filter((name) => current.settings[name].trim());
  find("active").textContent = set.length ? `Set: ${set.map((name) => labelOf(name)).join(", ")}` : "";
  const { prompt = 0, tokens = 0 } = current.messages.at(-1)?.stats ?? {};
  const most = model?.context_length;
  find("context").textContent =
    prompt && most ? `${NUMBER.format(prompt + tokens)} of ${NUMBER.format(most)} tokens` : "";
}

function showList() {
  const rows = byTime().map((conversation) => {
    const row = fromTemplate("row");
    const [name, rename, remove] = row.children;
    row.dataset.id = conversation.id;
    name.textContent = conversation.title;
    if (conversation === current) name.setAttribute("aria-current", "true");
    row.classList.toggle("running", running.has(conversation.id));
    rename.setAttribute("aria-label", `Rename ${conversation.title}`);
    remove.setAttribute("aria-label", `Delete ${conversation.title}`);
    return row;
  });
  const focused = document.activeElement.closest("#list li");
  const at = focused && [...focused.children].indexOf(document.activeElement);
  find("list").replaceChildren(...rows);
  if (focused) rows.find((row) => row.dataset.id === focused.dataset.id)?.children[at].focus();
  find("export-all").disabled = rows.length === 0;
}

let frame = 0;

/** An answer has begun or ended. */
function changed(conversation) {
  if (conversation === current) stickingToEnd(show);
  else showList();
}

/** There is more of an answer. The page shows it once a frame. */
function grew(conversation) {
  if (conversation !== current) return;
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    if (running.has(current.id)) stickingToEnd(() => showMessage(current.messages.at(-1), true));
  });
}

/** Change the page, and stay at the end of the conversation where that was shown. */
function stickingToEnd(change) {
  const end = isAtEnd();
  change();
  if (end) toEnd();
}

const isAtEnd = () =>
  find("scroller").scrollHeight - find("scroller").scrollTop - find("scroller").clientHeight < 80;

function toEnd() {
  find("scroller").scrollTop = find("scroller").scrollHeight;
}

function save(conversation) {
  if (!conversations.has(conversation.id)) return; // it was deleted meanwhile
  try {
    store(conversation);
    find("banner").textContent = "";
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    find("banner").textContent = error.message;
  }
}

/** Show another conversation. */
function open(conversation) {
  current = conversation;
  const hash = conversations.has(conversation.id) ? `#${conversation.id}` : location.pathname;
  history.replaceState(null, "", hash);
  show();
  toEnd();
  closeDrawer();
  toText();
}

/** Send a message: after the others, or in place of message number `at` and all after it. */
function send(content, at = current.messages.length) {
  current.messages.splice(at, Infinity, { role: "user", content });
  if (!conversations.has(current.id)) {
    current.title = titleOf(content);
    conversations.set(current.id, current);
    history.replaceState(null, "", `#${current.id}`);
  }
  current.updated = Date.now();
  save(current);
  start();
}

/** Have the last message of the user answered. */
function start() {
  const problem = problemOf(current.settings);
  if (problem) {
    current.failure = new Failure(problem.words, { field: problem.name });
    show();
    openSettings(problem.name);
    return;
  }
  for (const button of find("log").querySelectorAll(".editor .cancel")) button.click();
  if (current.messages.at(-1)?.role === "assistant") current.messages.pop();
  if (!model) meet(); // the server did not answer before
  answer(current, model?.id, { changed, grew, save });
  toEnd();
  toText();
}

/** Put the cursor into the message box, unless a keyboard would then cover half the screen. */
function toText() {
  if (hasKeyboard()) find("text").focus();
}

const titleOf = (text) => {
  const line = text.trim().split("\n", 1)[0];
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
};

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = find("text").value.trim();
  if (!text || running.has(current.id)) return;
  find("text").value = "";
  fit(find("text"));
  send(text);
});

find("text").addEventListener("input", () => fit(find("text")));
find("text").addEventListener("keydown", (event) => {
  if (!isSend(event)) return;
  event.preventDefault();
  find("composer").requestSubmit();
});

function stop() {
  running.get(current.id)?.abort();
  toText();
}

find("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (document.body.classList.contains("drawer")) {
    closeDrawer();
    find("menu").focus();
  } else stop();
});

find("log").addEventListener("click", ({ target }) => {
  const message = nodeMessages.get(target.closest("article"));
  const at = current.messages.indexOf(message);
  if (target.matches(".under .copy")) copy(message.content, target);
  else if (target.matches(".edit"))
    editMessage(message, current.messages.length - 1 - at, (text) => send(text, at));
  else if (target.matches(".again, .retry")) start();
  else if (target.matches(".open-field")) openSettings(target.dataset.field);
});

find("list").addEventListener("click", async ({ target }) => {
  const button = target.closest("button");
  const conversation = conversations.get(target.closest("li")?.dataset.id);
  if (!button || !conversation) return;
  if (button.matches(".name")) open(conversation);
  else if (button.matches(".rename")) {
    const field = { label: "Title", value: conversation.title };
    const title = await ask({ title: "Rename", text: "", confirm: "Rename", ...field });
    if (!title) return;
    conversation.title = title.slice(0, 200);
    save(conversation);
    show();
  } else {
    const text = `“${conversation.title}” will be gone from this browser.`;
    if ((await ask({ title: "Delete this conversation?", text, confirm: "Delete" })) !== null)
      remove(conversation);
  }
});

function remove(conversation) {
  running.get(conversation.id)?.abort();
  conversations.delete(conversation.id);
  unstore(conversation.id);
  find("banner").textContent = "";
  if (conversation === current) current = newConversation(current.settings);
  history.replaceState(null, "", location.pathname);
  show();
  find("new").focus();
}

find("new").addEventListener("click", () => open(newConversation(current.settings)));
find("latest").addEventListener("click", toEnd);
find("scroller").addEventListener("scroll", () => (find("latest").hidden = isAtEnd()));

const fileName = (what) =>
  `${what.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60)}-${new Date().toISOString().slice(0, 10)}.json`;
find("export").addEventListener("click", () => download(fileName(current.title), exported([current])));
find("export-all").addEventListener("click", () => download(fileName("conversations"), exported(byTime())));
find("import").addEventListener("click", () => find("import-file").click());
find("import-file").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  target.value = "";
  if (!file) return;
  try {
    if (file.size > LARGEST_FILE) throw new Refusal("This file is larger than 16 MB.");
    const all = imported(await file.text());
    for (const one of all) {
      if (conversations.has(one.id)) one.id = newConversation().id; // it may be an older state
      store(one);
      conversations.set(one.id, one);
    }
    showList();
    find("banner").textContent = "";
    announce(`${all.length} conversations were imported.`);
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    showList();
    find("banner").textContent = error.message;
  }
});

addEventListener("storage", ({ key }) => {
  if (!key?.startsWith(ITEM)) return;
  const id = key.slice(ITEM.length);
  const other = stored(id);
  if (running.has(id)) return;
  if (other) conversations.set(id, other);
  else conversations.delete(id);
  if (current.id === id && other) current = other;
  show();
});

addEventListener("pagehide", () => {
  for (const id of running.keys()) {
    const conversation = conversations.get(id);
    if (!conversation) continue;
    conversation.messages.at(-1).note = "The page was left before this answer was complete.";
    save(conversation);
  }
});
