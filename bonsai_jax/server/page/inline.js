// Emphasis, code, links and line breaks within a block of markdown.

const ESCAPED = new Set("\\`*_~<>#|!+-.");
const MARKS = ["**", "__", "~~", "*", "_"];
const NAMES = { "**": "strong", __: "strong", "~~": "s", "*": "em", _: "em" };
const ADDRESS = /https?:\/\/[^\s<>"'`*]{1,2000}/y;
const LONGEST_ADDRESS = 2000;
const HIDDEN = "\0"; // stands for characters that are no marks

/** The nodes of a text, in a fragment. */
function inline(text) {
  return inlineSlice({ text, ...hideCode(text) }, 0, text.length, 0, true);
}

/** Code spans, by where they begin, and the text with HIDDEN in place of their characters and of escaped
 * ones, in which no mark is looked for. */
function hideCode(text) {
  const codes = new Map();
  const runs = new Map(); // where runs of as many backticks begin
  const masked = text.split("");
  for (const run of text.matchAll(/`+/g)) {
    if (!runs.has(run[0].length)) runs.set(run[0].length, []);
    runs.get(run[0].length).push(run.index);
  }
  for (const starts of runs.values()) starts.reverse(); // the next is the last
  for (let at = 0; at < text.length; at++) {
    // A backslash before a mark takes its meaning.
    if (text[at] === "\\" && ESCAPED.has(text[at + 1])) masked[++at] = HIDDEN;
    else if (text[at] === "`") {
      let size = 1;
      while (text[at + size] === "`") size++;
      const starts = runs.get(size) ?? [];
      while (starts.length && starts.at(-1) < at + size) starts.pop();
      const end = starts.length ? starts.at(-1) + size : at;
      if (starts.length) codes.set(at, { from: at + size, to: end - size, end });
      masked.fill(HIDDEN, at, Math.max(end, at + size));
      at = Math.max(end, at + size) - 1;
    }
  }
  return { masked: masked.join(""), codes };
}

/** Nodes of source.text[at:end]. links: whether there may be links, in which there are none. */
function inlineSlice(source, at, end, depth, links) {
  const { text, masked, codes } = source;
  const fragment = document.createDocumentFragment();
  const open = new Set(MARKS); // marks of which an end may still come
  let plain = "";
  const add = (node, next) => {
    if (plain) fragment.append(plain);
    plain = "";
    fragment.append(node);
    at = next;
  };
  const within = (from, to, more) => inlineSlice(source, from, to, depth + 1, more);
  while (at < end) {
    const code = codes.get(at);
    if (code && code.end <= end) add(element("code", codeText(text.slice(code.from, code.to))), code.end);
    else if (masked[at] === "\\" && masked[at + 1] === HIDDEN) {
      plain += text[at + 1];
      at += 2;
    } else if (masked[at] === "\n") add(element("br"), at + 1);
    else {
      const emphasis = depth < MOST_DEPTH ? emphasisAt(masked, at, end, open) : null;
      const found = links && !emphasis ? linkAt(text, masked, at, end) : null;
      if (emphasis) {
        const { mark, to } = emphasis;
        add(element(NAMES[mark], within(at + mark.length, to, links)), to + mark.length);
      } else if (found)
        add(link(found.address, found.label ? within(...found.label, false) : found.address), found.end);
      else plain += text[at++];
    }
  }
  if (plain) fragment.append(plain);
  return fragment;
}

/** Code that begins and ends with a space, so that it can hold a backtick there, is shown without both. */
const codeText = (code) =>
  code.startsWith(" ") && code.endsWith(" ") && code.trim() ? code.slice(1, -1) : code;

const isSpace = (character) => character === undefined || /\s/.test(character);
const isWord = (character) => character !== undefined && /[\p{L}\p{N}_]/u.test(character);

/** The emphasis that begins here: its mark, and where its text ends. */
function emphasisAt(masked, at, end, open) {
  const mark = MARKS.find((one) => masked.startsWith(one, at));
  if (!mark || !open.has(mark) || isSpace(masked[at + mark.length])) return null;
  if (mark[0] === "_" && isWord(masked[at - 1])) return null;
  const next = (from) => masked.indexOf(mark, from);
  for (let to = next(at + mark.length + 1); to >= 0 && to + mark.length <= end; to = next(to + 1)) {
    const before = masked[to - 1];
    const after = to + mark.length < end ? masked[to + mark.length] : undefined;
    if (isSpace(before) || after === mark[0] || (mark.length === 1 && before === mark)) continue;
    if (mark[0] === "_" && isWord(after)) continue;
    return { mark, to };
  }
  open.delete(mark); // what cannot end after here can end after no later place either
  return null;
}

/** The link that begins here: [label](address), ![label](address), <address>, or an address alone. */
function linkAt(text, masked, at, end) {
  const character = masked[at];
  if (character === "[" || (character === "!" && masked[at + 1] === "["))
    return labelledAt(text, masked, at, end);
  const from = character === "<" ? at + 1 : at;
  if (!masked.startsWith("http", from) || isWord(masked[from - 1])) return null;
  ADDRESS.lastIndex = from;
  let address = ADDRESS.exec(masked)?.[0].slice(0, end - from);
  if (!address || address.length >= LONGEST_ADDRESS) return null;
  if (character === "<") {
    const last = from + address.length;
    return masked[last] === ">" ? linked({ address, end: last + 1 }) : null;
  }
  while (/[.,;:!?]$/.test(address) || closesTooMany(address)) address = address.slice(0, -1);
  return linked({ address, end: from + address.length });
}

/** Whether the parenthesis at an address's end belongs to the sentence around it. */
const closesTooMany = (address) =>
  address.endsWith(")") && address.split(")").length > address.split("(").length;

const LABEL = /!?\[([^[\]]{0,1000})\]\(/y;

function labelledAt(text, masked, at, end) {
  LABEL.lastIndex = at;
  const label = LABEL.exec(masked);
  if (!label) return null;
  const from = at + label[0].length;
  let to = from;
  let open = 1; // parentheses
  for (; to < Math.min(end, from + LONGEST_ADDRESS); to++) {
    if (masked[to] === "(") open++;
    else if (masked[to] === ")" && --open === 0) break;
  }
  if (open || to >= end) return null;
  const address = text.slice(from, to).trim().split(/\s/, 1)[0].replace(/^<|>$/g, "");
  const start = from - 2 - label[1].length;
  return linked({ address, label: label[1] ? [start, from - 2] : null, end: to + 1 });
}

/** A link whose address is one that may be followed, in full; null for another, which is shown as it is
 * written. */
function linked(found) {
  if (!URL.canParse(found.address)) return null;
  const { href, protocol } = new URL(found.address);
  return ["http:", "https:", "mailto:"].includes(protocol) ? { ...found, address: href } : null;
}

function link(address, content) {
  const node = element("a", content);
  node.href = address;
  node.title = address;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  return node;
}
