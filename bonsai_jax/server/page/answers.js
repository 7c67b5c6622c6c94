// Answers as they come.

const running = new Map(); // the AbortController of each conversation's answer, by id
const NOTHING = "The model wrote nothing.";
const STOPPED = "You stopped this answer.";
const CUT =
  "The answer was cut: it reached the most tokens, the end of the context, or the server's time limit.";

/** Let the model answer a conversation, whose last message is the user's. `changed` is called when the answer
 * begins, and when it has ended and is saved; `grew` whenever there is more of it. */
async function answer(conversation, model, { changed, grew, save }) {
  const body = bodyOf(conversation, model);
  const message = { role: "assistant", content: "", reasoning: "", note: "", seconds: 0, stats: {} };
  message.json = body.response_format !== undefined;
  const controller = new AbortController();
  conversation.messages.push(message);
  conversation.failure = null;
  running.set(conversation.id, controller);
  changed(conversation);
  try {
    let began = 0; // to think
    for await (const chunk of chunksOf(body, controller.signal)) {
      take(message, chunk);
      if (message.reasoning) began ||= performance.now();
      if (began && message.content) message.seconds ||= (performance.now() - began) / 1000;
      grew(conversation);
    }
    if (!message.content && !message.note) message.note = NOTHING;
  } catch (error) {
    if (error.name === "AbortError") message.note = STOPPED;
    else if (error instanceof Failure) conversation.failure = error;
    else throw error;
  } finally {
    running.delete(conversation.id);
    const incomplete = conversation.failure || message.note === STOPPED;
    if (incomplete && !message.content && !message.reasoning) conversation.messages.pop();
    conversation.updated = Date.now();
    save(conversation);
    changed(conversation);
  }
  announce(conversation.failure ? "" : `The model: ${message.content.slice(0, 1000)}`);
}

/** Add a chunk to a message. */
function take(message, { choices = [], usage, timings }) {
  const [{ delta = {}, finish_reason: finish } = {}] = choices;
  message.reasoning += delta.reasoning_content ?? "";
  message.content += delta.content ?? "";
  if (finish === "length") message.note = CUT;
  if (!usage) return;
  message.stats = {
    tokens: usage.completion_tokens,
    prompt: usage.prompt_tokens,
    cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
    ...(timings && { speed: timings.predicted_per_second, wait: timings.prompt_ms / 1000 }),
  };
}
