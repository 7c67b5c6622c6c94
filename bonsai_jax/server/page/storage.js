// Conversations, in this browser's localStorage: an item each, so that two tabs do not overwrite each
// other's.

const ITEM = "bonsai-jax/conversation/";
const MOST_CHARACTERS = 4_500_000; // of all items: browsers give a site about 5 million
const FORMAT = "bonsai-jax conversations";
const FIELDS = [
  "system",
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "max_tokens",
  "seed",
  "reasoning_effort",
  "stop",
  "schema",
];

/** Something that the user is told in these words. */
class Refusal extends Error {}

/** {id, title, updated, settings: {field: text}, messages: [message]}, a message being {role, content} and,
 * of the model, {reasoning, seconds: of thinking, json: whether a schema was kept to, note, stats: {name:
 * number}}. */
function newConversation(settings = {}) {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) =>
    byte.toString(16).padStart(2, "0"),
  ).join("");
  const own = Object.fromEntries(FIELDS.map((name) => [name, settings[name] ?? ""]));
  return { id, title: "New conversation", updated: Date.now(), settings: own, messages: [] };
}

/** The conversation in a value, with the fields that are stored and no others. Raises Refusal. */
function conversationFrom(value) {
  const must = (holds, what) => {
    if (!holds) throw new Refusal(`Not a conversation of this page: ${what}.`);
  };
  const text = (one, what) => {
    must(one === undefined || typeof one === "string", `${what} is not a text`);
    return one ?? "";
  };
  const isObject = (one) => typeof one === "object" && one !== null && !Array.isArray(one);
  must(isObject(value), "it is not an object");
  must(/^[\w-]{1,64}$/.test(text(value.id, "its id")), "its id is not made of letters and digits");
  must(Number.isFinite(value.updated), "it has no time");
  must(isObject(value.settings ?? {}), "its settings are not an object");
  must(Array.isArray(value.messages), "its messages are not a list");
  const messages = value.messages.map((message) => {
    must(isObject(message), "a message is not an object");
    const { role, content, reasoning, note, seconds } = message;
    must(role === "user" || role === "assistant", "a message is neither the user's nor the assistant's");
    const own = { role, content: text(content, "the content of a message") };
    if (role === "user") return own;
    const stats = Object.entries(isObject(message.stats) ? message.stats : {}).filter(([, one]) =>
      Number.isFinite(one),
    );
    return {
      ...own,
      reasoning: text(reasoning, "a thought"),
      note: text(note, "a note"),
      seconds: Number.isFinite(seconds) ? seconds : 0,
      json: message.json === true,
      stats: Object.fromEntries(stats),
    };
  });
  const settings = Object.fromEntries(FIELDS.map((name) => [name, text(value.settings?.[name], name)]));
  const title = text(value.title, "its title").slice(0, 200) || "Untitled";
  return { id: value.id, title, updated: value.updated, settings, messages };
}

/** localStorage, or null where the browser gives none. */
function browserStorage() {
  try {
    localStorage.setItem("bonsai-jax/probe", "");
    localStorage.removeItem("bonsai-jax/probe");
    return localStorage;
  } catch {
    return null;
  }
}

const kept = browserStorage();

const storedIds = () =>
  Object.keys(kept ?? {})
    .filter((key) => key.startsWith(ITEM))
    .map((key) => key.slice(ITEM.length));

/** The stored conversation of an id; null where there is none that can be read. */
function stored(id) {
  try {
    return conversationFrom(JSON.parse(kept.getItem(ITEM + id)));
  } catch {
    return null; // left where it is
  }
}

/** Store a conversation. Raises Refusal where there is no room for it. */
function store(conversation) {
  if (!kept)
    throw new Refusal(
      "This browser keeps nothing for this page: conversations end with it, unless you export them.",
    );
  const key = ITEM + conversation.id;
  const item = JSON.stringify(conversationFrom(conversation));
  const others = Object.keys(kept).filter((other) => other !== key);
  const taken = others.reduce((sum, other) => sum + other.length + kept.getItem(other).length, 0);
  const full =
    "There is no more room for conversations in this browser. What you write now is lost when the page is " +
    "closed: export this conversation, or delete others.";
  if (taken + key.length + item.length > MOST_CHARACTERS) throw new Refusal(full);
  try {
    kept.setItem(key, item);
  } catch {
    throw new Refusal(full);
  }
}

const unstore = (id) => kept?.removeItem(ITEM + id);

/** The text of a file of these conversations. */
function exported(conversations) {
  return JSON.stringify(
    { format: FORMAT, version: 1, conversations: conversations.map(conversationFrom) },
    null,
    1,
  );
}

/** The conversations of a file's text. Raises Refusal. */
function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch (error) {
    throw new Refusal(`This file is not JSON: ${error.message}`);
  }
  if (file?.format !== FORMAT || file.version !== 1 || !Array.isArray(file.conversations))
    throw new Refusal("This file was not exported by this page.");
  return file.conversations.map(conversationFrom);
}
