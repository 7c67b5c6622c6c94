// Settings of the current conversation, the colors, the drawer of a narrow window, and what the server says
// of itself.

const form = find("settings").querySelector("form");

/** What a setting is called. */
const labelOf = (name) =>
  ({
    system: "system prompt",
    temperature: "temperature",
    top_p: "top p",
    top_k: "top k",
    min_p: "min p",
    max_tokens: "most tokens",
    seed: "seed",
    reasoning_effort: "thinking",
    stop: "stop texts",
    schema: "JSON schema",
  })[name];

/** The first setting that cannot be sent, and why; null: there is none. */
function problemOf(settings) {
  for (const name of FIELDS) {
    const words = settings[name].trim() && wordsFor(name, settings[name]);
    if (words) return { name, words: `The setting “${labelOf(name)}” cannot be sent: ${words}` };
  }
  return null;
}

/** What is wrong with a setting; "": nothing. */
function wordsFor(name, value) {
  if (name === "schema") return schemaWords(value);
  const input = form.elements[name];
  if (input.type !== "number") return "";
  const number = Number(value);
  const { min, max, step } = input;
  if (!Number.isFinite(number)) return "it is not a number.";
  if (step === "1" && !Number.isSafeInteger(number)) return "it is not a whole number.";
  if (min && number < Number(min)) return `it is less than ${min}.`;
  return max && number > Number(max) ? `it is more than ${max}.` : "";
}

function schemaWords(text) {
  try {
    const schema = JSON.parse(text);
    return typeof schema === "object" && schema && !Array.isArray(schema) ? "" : "it is not a JSON object.";
  } catch (error) {
    return `it is not JSON. ${error.message}.`;
  }
}

function openSettings(field = "system") {
  for (const name of FIELDS) {
    form.elements[name].value = current.settings[name];
    showProblem(name);
  }
  find("change-key").hidden = !apiKey;
  find("settings").showModal();
  form.elements[field].focus();
}

/** Show what is wrong with a field below it. Returns whether there is something. */
function showProblem(name) {
  const input = form.elements[name];
  const value = input.value.trim();
  const words = input.validity.badInput ? "it is not a number." : value && wordsFor(name, value);
  const id = `problem-${name}`;
  find(id)?.remove();
  if (!words) {
    input.removeAttribute("aria-invalid");
    input.removeAttribute("aria-describedby");
    return false;
  }
  const note = element("span", `${words[0].toUpperCase()}${words.slice(1)}`);
  Object.assign(note, { id, className: "problem" });
  input.after(note);
  input.setAttribute("aria-invalid", "true");
  input.setAttribute("aria-describedby", id);
  return true;
}

form.addEventListener("input", ({ target }) => {
  current.settings[target.name] = target.value;
  showProblem(target.name);
});

form.addEventListener("submit", (event) => {
  const wrong = FIELDS.find(showProblem);
  if (!wrong) return;
  event.preventDefault();
  form.elements[wrong].focus();
});

find("settings").addEventListener("close", () => {
  save(current);
  showHints();
});

find("reset").addEventListener("click", () => {
  for (const name of FIELDS) {
    form.elements[name].value = current.settings[name] = "";
    showProblem(name);
  }
  announce("All settings are empty.");
});

find("change-key").addEventListener("click", () => {
  find("settings").close();
  askForKey();
});

find("open-settings").addEventListener("click", () => openSettings());

// Colors: the system's, until the user has chosen.

const systemDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () =>
  (document.documentElement.dataset.theme ?? (systemDark.matches ? "dark" : "light")) === "dark";

function showTheme() {
  find("theme").setAttribute("aria-pressed", String(isDark()));
}

function setTheme(theme) {
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
  showTheme();
}

find("theme").addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  setTheme(theme);
  try {
    kept?.setItem("bonsai-jax/theme", theme);
  } catch {
    // no room: the choice ends with the page
  }
});
systemDark.addEventListener("change", showTheme);
setTheme(kept?.getItem("bonsai-jax/theme"));

// The list of conversations, in a narrow window.

function openDrawer() {
  document.body.classList.add("drawer");
  find("shade").hidden = false;
  find("page").inert = true;
  find("menu").setAttribute("aria-expanded", "true");
  find("new").focus();
}

function closeDrawer() {
  document.body.classList.remove("drawer");
  find("shade").hidden = true;
  find("page").inert = false;
  find("menu").setAttribute("aria-expanded", "false");
}

find("menu").addEventListener("click", openDrawer);
matchMedia("(min-width: 60.01rem)").addEventListener("change", closeDrawer);
find("shade").addEventListener("click", closeDrawer);

// The server.

async function meet() {
  try {
    const { data } = await (await request("v1/models")).json();
    model = data[0];
    const context = model.context_length ? `, reads ${NUMBER.format(model.context_length)} tokens` : "";
    find("model").textContent = `${model.id}${context}`;
    showHints();
    await waitUntilReady(find("model").textContent);
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    find("model").textContent = error.message;
  }
}

/** Say that the server is still compiling, until it is not. */
async function waitUntilReady(name) {
  while ((await fetch("ready").catch(() => null))?.status === 503) {
    find("model").textContent = `${name}; still compiling, so the first answer takes longer`;
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
  find("model").textContent = name;
}

show();
toEnd();
toText();
meet();
