// A model's markdown as DOM nodes. No text of the model is ever parsed as HTML: every piece of it becomes a
// text node, and the only attributes that it sets are a link's address (http, https, mailto) and a list's
// first number. Images are links, so that no answer makes the browser ask another server. Nesting is bounded,
// and no search goes over the same text twice, so that a hostile answer cannot hold up the page.

const MOST_DEPTH = 8;
const MOST_BLANK = 8; // lines within an item of a list
const MARKER = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const FENCE = /^( {0,3})(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: +(.*))?$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;

const shownBlocks = new WeakMap();

/** Show a text in a container. Blocks that were there before stay as they are, so that a selection, a
 * scrolled code block and a reader's place survive while an answer grows. */
function showMarkdown(container, text) {
  const blocks = blocksOf(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"), 0);
  const before = shownBlocks.get(container) ?? [];
  blocks.forEach((block, i) => {
    if (before[i] === block.source) return;
    const node = block.node();
    if (i < container.childNodes.length) container.childNodes[i].replaceWith(node);
    else container.append(node);
  });
  while (container.childNodes.length > blocks.length) container.lastChild.remove();
  shownBlocks.set(
    container,
    blocks.map((block) => block.source),
  );
}

/** Blocks of some lines: their source, and a function that makes the node. */
function blocksOf(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const [end, node] = blockAt(lines, at, depth);
    blocks.push({ source: lines.slice(at, end).join("\n"), node });
    at = end;
  }
  return blocks;
}

/** The block that begins at a line: the line after it, and a function that makes its node. */
function blockAt(lines, at, depth) {
  const line = lines[at];
  const fence = fenceOf(line);
  if (fence) return fencedAt(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const name = `h${Math.min(6, heading[1].length + 2)}`; // the page has levels of its own above
    return [at + 1, () => element(name, inline(headingText(heading[2] ?? "")))];
  }
  if (RULE.test(line)) return [at + 1, () => element("hr")];
  if (depth < MOST_DEPTH && QUOTE.test(line)) {
    const end = endOf(lines, at, (next) => QUOTE.test(next));
    const inner = lines.slice(at, end).map((one) => one.replace(QUOTE, ""));
    return [end, () => element("blockquote", ...nodes(inner, depth + 1))];
  }
  if (depth < MOST_DEPTH && MARKER.test(line)) return listAt(lines, at, depth);
  if (isTable(lines, at)) return tableAt(lines, at);
  const end = endOf(lines, at + 1, (next, i) => next.trim() && !interrupts(next) && !isTable(lines, i));
  const text = lines.slice(at, end).map((one) => one.trim());
  return [end, () => element("p", inline(text.join("\n")))];
}

const nodes = (lines, depth) => blocksOf(lines, depth).map((block) => block.node());

/** The first line from `at` on for which a condition does not hold. */
function endOf(lines, at, holds) {
  while (at < lines.length && holds(lines[at], at)) at++;
  return at;
}

/** Whether a line ends the paragraph before it. */
function interrupts(line) {
  const marker = MARKER.exec(line);
  const item =
    marker && marker[0].length < line.length && (marker[2].length === 1 || marker[2].startsWith("1"));
  return item || fenceOf(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line);
}

function headingText(text) {
  const trimmed = text.trimEnd();
  let end = trimmed.length;
  while (trimmed[end - 1] === "#") end--;
  return end === 0 || trimmed[end - 1] === " " ? trimmed.slice(0, end).trim() : trimmed.trim();
}

function fenceOf(line) {
  const fence = FENCE.exec(line);
  return fence && !(fence[2][0] === "`" && fence[3].includes("`")) ? fence : null;
}

/** A code block; without its end, all that is left. */
function fencedAt(lines, at, [, indent, mark, info]) {
  const closes = (line) => {
    const fence = FENCE.exec(line);
    return fence && fence[2].startsWith(mark) && !fence[3].trim();
  };
  const end = endOf(lines, at + 1, (line) => !closes(line));
  const code = lines.slice(at + 1, end).map((line) => unindented(line, indent.length));
  const language = info.trim().split(/[\s{]/, 1)[0];
  return [Math.min(lines.length, end + 1), () => codeBlock(code.join("\n"), language)];
}

/** A code block with a button that copies it. */
function codeBlock(text, language) {
  const block = fromTemplate("code");
  const name = language.slice(0, 40);
  block.querySelector("span").textContent = name;
  block.querySelector("pre").setAttribute("aria-label", name ? `Code, ${name}` : "Code");
  block.querySelector("code").textContent = text;
  const button = block.querySelector("button");
  button.setAttribute("aria-label", "Copy code");
  button.addEventListener("click", () => copy(text, button));
  return block;
}

const indentOf = (line) => line.length - line.trimStart().length;
const unindented = (line, spaces) => line.slice(Math.min(spaces, indentOf(line)));

function listAt(lines, at, depth) {
  const first = MARKER.exec(lines[at]);
  const base = first[1].length;
  const ordered = first[2].length > 1;
  const items = [];
  const isItem = (line) => {
    const marker = MARKER.exec(line);
    if (!marker || marker[1].length >= base + 2) return null;
    return (ordered ? marker[2].length > 1 : marker[2] === first[2]) ? marker : null;
  };
  while (at < lines.length && isItem(lines[at]) && !RULE.test(lines[at])) {
    const marker = isItem(lines[at]);
    const width = marker[3].length > 4 ? marker[1].length + marker[2].length + 1 : marker[0].length;
    const item = [lines[at].slice(width)];
    const end = endOf(lines, at + 1, (line, i) => continues(line, lines, i, base));
    for (const line of lines.slice(at + 1, end)) item.push(unindented(line, width));
    items.push(item);
    at = end;
  }
  const build = () => {
    const list = element(
      ordered ? "ol" : "ul",
      ...items.map((item) => element("li", ...nodes(item, depth + 1))),
    );
    if (ordered && parseInt(first[2]) !== 1) list.start = parseInt(first[2]);
    return list;
  };
  return [at, build];
}

/** Whether a line belongs to the list's item that began before it. A blank one does where an indented one, or
 * another item, follows. */
function continues(line, lines, at, base) {
  if (!line.trim()) {
    const next = lines.slice(at + 1, at + MOST_BLANK).find((one) => one.trim());
    return next !== undefined && (indentOf(next) >= base + 2 || MARKER.test(next));
  }
  if (indentOf(line) >= base + 2) return true;
  return lines[at - 1].trim() && !MARKER.test(line) && !interrupts(line);
}

/** The cells of a table's line. A bar after a backslash, or in code, is none. */
function cellsOf(line) {
  const cells = [""];
  let code = false;
  for (let i = 0; i < line.length; i++) {
    if (line[i] === "\\" && line[i + 1] === "|") cells[cells.length - 1] += line[++i];
    else if (line[i] === "|" && !code) cells.push("");
    else {
      if (line[i] === "`") code = !code;
      cells[cells.length - 1] += line[i];
    }
  }
  const trimmed = cells.map((cell) => cell.trim());
  if (trimmed.length > 1 && !trimmed[0]) trimmed.shift();
  if (trimmed.length > 1 && !trimmed.at(-1)) trimmed.pop();
  return trimmed;
}

function isTable(lines, at) {
  const below = lines[at + 1];
  if (below === undefined || !lines[at].includes("|") || !/^[ |:-]+$/.test(below) || !below.includes("-"))
    return false;
  const marks = cellsOf(below);
  return marks.every((cell) => /^:?-+:?$/.test(cell)) && marks.length === cellsOf(lines[at]).length;
}

function tableAt(lines, at) {
  const end = endOf(lines, at + 2, (line) => line.trim() && line.includes("|"));
  const build = () => {
    const width = cellsOf(lines[at]).length;
    const side = (mark) => (!mark.endsWith(":") ? "" : mark.startsWith(":") ? "center" : "right");
    const sides = cellsOf(lines[at + 1]).map(side);
    const row = (line, name) => {
      const cells = cellsOf(line)
        .slice(0, width)
        .map((cell, i) => {
          const node = element(name, inline(cell));
          if (sides[i]) node.className = sides[i];
          return node;
        });
      return element("tr", ...cells);
    };
    const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
    const frame = element(
      "div",
      element("table", element("thead", row(lines[at], "th")), element("tbody", ...body)),
    );
    frame.className = "scrolls";
    frame.tabIndex = 0;
    frame.setAttribute("role", "group");
    frame.setAttribute("aria-label", "Table");
    return frame;
  };
  return [end, build];
}
