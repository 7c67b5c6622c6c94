// Answers as they come.

const running = new Map(); // the AbortController of each conversation's answer, by id
const NOTHING = "The model wrote nothing.";
const CUT = "The answer was cut: it reached the most tokens, the end of the context, or the server's time limit.";

/** Let the model answer a conversation, whose last message is the user's. `show` and `save` are called with it. */
async function answer(conversation, model, { show, save }) {
  const body = bodyOf(conversation, model);
  const message = { role: "assistant", content: "", reasoning: "", note: "", seconds: 0, stats: {} };
  message.json = body.response_format !== undefined;
  const controller = new AbortController();
  conversation.messages.push(message);
  conversation.failure = null;
  running.set(conversation.id, controller);
  show(conversation);
  try {
    const began = performance.now();
    for await (const chunk of chunksOf(body, controller.signal)) {
      take(message, chunk, began);
      show(conversation);
    }
    if (!message.content && !message.note) message.note = NOTHING;
  } catch (error) {
    if (error.name === "AbortError") message.note = "You stopped this answer.";
    else if (error instanceof Failure) conversation.failure = error;
    else throw error;
  } finally {
    running.delete(conversation.id);
    if (!message.content && !message.reasoning && message.note !== NOTHING) conversation.messages.pop();
    conversation.updated = Date.now();
    save(conversation);
    show(conversation);
  }
  announce(conversation.failure ? "" : `The model: ${message.content.slice(0, 1000)}`);
}

/** Add a chunk to a message. began: on the clock of performance.now. */
function take(message, { choices = [], usage, timings }, began) {
  const [{ delta = {}, finish_reason: finish } = {}] = choices;
  message.reasoning += delta.reasoning_content ?? "";
  if (delta.content && !message.content && message.reasoning) message.seconds = (performance.now() - began) / 1000;
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
