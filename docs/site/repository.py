"""A hook of mkdocs: links from a page to a file of the repository lead to that file on the site.

docs/ is the site. A linked Markdown file outside of it becomes a page too, a notebook a page with its output,
and a Python file a page that shows it; pictures are copied. All of them lie under repository/, and scripts of
docs/ beside their page. So a page has the same links on the site, on GitHub and in an editor, and a link that
leads nowhere stops `mkdocs build --strict`.
"""

import base64
import json
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
PAGES = (".md", ".py", ".ipynb")


def on_files(files: Files, config) -> Files:
    """Add the linked files, and those that they link."""
    waiting = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    while waiting:
        source, markdown = waiting.pop()
        for _, target, _ in LINK.findall(markdown):
            path = linked(source, target)
            if path is None or files.get_file_from_path(uri := site_uri(path)):
                continue
            if path.endswith(PAGES):
                content = page(path, files, config)
                waiting.append((path, content))
                files.append(File.generated(config, uri, content=content))
            else:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    """Each link that `on_files` followed, as it is on the site."""
    uri = page.file.src_uri
    source = uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"
    source = re.sub(r"\.(py|ipynb)\.md$", r".\1", source)

    def on_the_site(link: re.Match) -> str:
        path = linked(source, link[2])
        if path is None:
            return link[0]
        return link[1] + posixpath.relpath(site_uri(path), posixpath.dirname(uri)) + link[3]

    return LINK.sub(on_the_site, markdown)


def linked(source: str, target: str) -> str | None:
    """The file of the repository that a link in the file `source` leads to; None: mkdocs finds it, or says
    that it is missing."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if path.startswith("..") or not (ROOT / path).is_file():
        return None
    return (
        None if source.startswith("docs/") and path.startswith("docs/") and not path.endswith(".py") else path
    )


def site_uri(path: str) -> str:
    """Where a file of the repository lies among the site's sources."""
    uri = path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"
    return f"{uri}.md" if path.endswith((".py", ".ipynb")) else uri


def page(path: str, files: Files, config) -> str:
    """The Markdown that shows a file. Search leaves out the log: it says most words somewhere."""
    text = (ROOT / path).read_text()
    if path == "benchmarks/LOG.md":
        return f"---\nsearch:\n  exclude: true\n---\n{text}"
    if path.endswith(".py"):
        return f"# {posixpath.basename(path)}\n\n```python\n{text}```\n"
    if path.endswith(".ipynb"):
        return "\n\n".join(cells(path, json.loads(text), files, config))
    return text


def cells(path: str, notebook: dict, files: Files, config):
    """A notebook's cells and what they printed and drew, as Markdown."""
    for number, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{posixpath.basename(path)}-{number}.png"
                picture = base64.b64decode("".join(data["image/png"]))
                uri = posixpath.join(posixpath.dirname(site_uri(path)), name)
                files.append(File.generated(config, uri, content=picture))
                yield f"![what the cell drew]({name})"
            elif text := "".join(data["text/plain"]).rstrip():
                yield f"```text\n{text}\n```"
