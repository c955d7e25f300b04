"""Adds to the site of mkdocs.yml what lies outside of docs/. mkdocs calls the functions `on_...`."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
# By path in the repository: the name in the site.
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
}
_IMAGES = (".png", ".svg")
_LINK = re.compile(r"(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^()\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages, and the images that they show."""
    for source, name in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
        for link in _LINK.finditer(text):
            path = _in_repository(link["target"], source)
            if path.endswith(_IMAGES) and not path.startswith("docs/"):
                files.append(File.generated(config, _in_site(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Turns links between files of the repository into links between pages. A link to another file becomes its text."""
    name = page.file.src_uri
    source = next((path for path, other in OUTSIDE.items() if other == name), f"docs/{name}")

    def changed(link: re.Match[str]) -> str:
        target, _, anchor = link["target"].partition("#")
        path = _in_repository(target, source) if target else source
        if "://" in link["target"] or not (ROOT / path).exists():
            return link[0]
        place = _in_site(path)
        if files.get_file_from_path(place) is None:
            return link["text"].strip("[]")
        relative = posixpath.relpath(place, posixpath.dirname(name) or ".")
        return f"{link['text']}({relative}{'#' + anchor if anchor else ''})"

    return _LINK.sub(changed, markdown)


def _in_repository(target: str, source: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target.partition("#")[0]))


def _in_site(path: str) -> str:
    """The place in the site of a file of the repository."""
    return OUTSIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else path)
