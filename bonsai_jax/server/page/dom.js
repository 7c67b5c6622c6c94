// What the other scripts need to make and find elements, to ask the user, and to tell a screen reader.

const find = (id) => document.getElementById(id);

/** An element with children: nodes, or texts. */
function element(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

/** The element in a <template>, new. */
const fromTemplate = (id) => find(id).content.firstElementChild.cloneNode(true);

/** Whether there is likely a keyboard that takes no room of the screen. */
const hasKeyboard = () => matchMedia("(hover: hover)").matches;

/** Say something that is shown elsewhere to a screen reader, when it has a moment. */
function announce(text) {
  find("status").textContent = ""; // so that the same text is said again
  setTimeout(() => (find("status").textContent = text), 50);
}

let questions = Promise.resolve(); // one after another

/** Ask in a dialog. Returns what was typed, or "" where there is no field (label); null: the user would
 * rather not. */
function ask(question) {
  questions = questions.then(() => asked(question));
  return questions;
}

function asked({ title, text, confirm, label = "", value = "", type = "text" }) {
  const dialog = find("question");
  const input = find("answer");
  find("question-title").textContent = title;
  find("question-text").textContent = text;
  find("question-text").hidden = !text;
  find("question-label").hidden = !label;
  find("question-label").firstElementChild.textContent = label;
  find("confirm").textContent = confirm;
  Object.assign(input, { type, value, disabled: !label });
  dialog.returnValue = "";
  find("confirm").value = "yes";
  find("cancel").onclick = () => dialog.close("");
  dialog.showModal();
  (label ? input : find("cancel")).focus();
  input.select();
  return new Promise((resolve) => {
    const closed = () => {
      resolve(dialog.returnValue === "yes" ? input.value.trim() : null);
      input.value = "";
    };
    dialog.addEventListener("close", closed, { once: true });
  });
}

/** Copy a text, and say so on the button for a moment. */
async function copy(text, button) {
  const name = (button.dataset.name ??= button.textContent);
  button.textContent = (await copied(text)) ? "Copied" : "Not copied";
  announce(button.textContent);
  setTimeout(() => (button.textContent = name), 1500);
}

async function copied(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      return false; // the browser's user has not allowed it
    }
  }
  // Browsers give pages of other machines no clipboard without TLS, but still have the old way.
  const area = element("textarea");
  area.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

/** Let the browser save a text as a file. */
function download(name, text) {
  const anchor = element("a");
  anchor.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  anchor.download = name;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 60_000);
}
