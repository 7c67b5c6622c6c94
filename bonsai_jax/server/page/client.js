// The server's API: requests, streamed answers, and errors in plain words. Addresses are relative, so that
// the page works below a path of a proxy, too.

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const KEY = "bonsai-jax/key"; // in sessionStorage: forgotten when the tab is closed

/** What went wrong, in words for the user. retry: whether the same request may do better. */
class Failure extends Error {
  constructor(words, { retry = true, field = null } = {}) {
    super(words);
    Object.assign(this, { retry, field });
  }
}

const SHORTEN = "Shorten it by editing an earlier message, or begin a new one.";

let apiKey = sessionKey();
let asking = null; // the question for a key that is on the screen

function sessionKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

/** Ask for a key. Returns whether one was given. Several requests share one question. */
function askForKey() {
  asking ??= (async () => {
    const text = apiKey
      ? "The server does not know this key."
      : "This server answers those who have a key. It is kept until this tab is closed.";
    const key = await ask({ title: "API key", text, label: "API key", type: "password", confirm: "Use it" });
    asking = null;
    if (!key) return false;
    apiKey = key;
    try {
      sessionStorage.setItem(KEY, key);
    } catch {
      // it is used until the page is left
    }
    return true;
  })();
  return asking;
}

/** A response of the server, whose status is good. Asks for a key where one is needed. Raises Failure. */
async function request(path, options = {}) {
  for (;;) {
    const key = apiKey;
    const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure(
        "The server does not answer. Is it still running, and is this machine connected to it?",
      );
    }
    if (response.ok) return response;
    if (response.status !== 401) throw await failureOf(response);
    if (key === apiKey && !(await askForKey()))
      throw new Failure("This server answers only with an API key.");
  }
}

/** The Failure of a response with an error's status. */
async function failureOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // a proxy's error: no JSON
  }
  const after = parseInt(response.headers.get("retry-after"));
  const later = after > 1 ? `try again in ${after} seconds` : "try again in a moment";
  return new Failure(...wordsOf(response.status, error, later));
}

/** The words for an error, and what Failure takes beside them. */
function wordsOf(status, { message = "", code = "", param = null }, later) {
  const reason = message ? ` It says: ${message}` : "";
  if (status === 429) return [`The server has too many requests just now: ${later}.`];
  if (code === "context_length_exceeded")
    return [
      `This conversation has become longer than the model can read.${reason} ${SHORTEN}`,
      { retry: false },
    ];
  if (status === 413)
    return ["This conversation is too large for the server. Begin a new one.", { retry: false }];
  if (status === 400) return [`The server cannot do this.${reason}`, { field: param?.split(".")[0] ?? null }];
  if (status === 403) return [`The server refuses this page.${reason}`, { retry: false }];
  if (status === 404 || status === 405) return ["There is no model server at this address."];
  if (status === 503 || status === 502 || status === 504)
    return [`The server cannot answer now: ${later}.${reason}`];
  return [`The server failed (status ${status}).${reason}`];
}

/** The body of the request for a conversation's next answer. */
function bodyOf({ settings, messages }, model) {
  const body = { messages: [], stream: true, stream_options: { include_usage: true } };
  if (model) body.model = model;
  if (settings.system.trim()) body.messages.push({ role: "system", content: settings.system });
  for (const { role, content, reasoning } of messages) {
    const last = body.messages.at(-1);
    // Templates want turns: messages that were never answered become one.
    if (last?.role === role) last.content += `\n\n${content}`;
    else body.messages.push({ role, content, ...(reasoning && { reasoning_content: reasoning }) });
  }
  for (const name of NUMBERS) if (settings[name].trim()) body[name] = Number(settings[name]);
  if (settings.reasoning_effort) body.reasoning_effort = settings.reasoning_effort;
  const stop = settings.stop.split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  if (settings.schema.trim()) {
    const schema = JSON.parse(settings.schema);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  return body;
}

/** Chunks of a streamed answer, as they come. Raises Failure. */
async function* chunksOf(body, signal) {
  const headers = { "content-type": "application/json" };
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers,
    body: JSON.stringify(body),
    signal,
  });
  try {
    for await (const data of eventsOf(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error)
        throw new Failure(`The server broke off. It says: ${chunk.error.message ?? "nothing"}`);
      yield chunk;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Failure) throw error;
    throw new Failure("The connection broke off before the answer was complete.");
  }
  throw new Failure("The connection broke off before the answer was complete.");
}

/** The data of server-sent events, each one line. */
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6).trimEnd();
  }
}
