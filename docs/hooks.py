"""What mkdocs does beside its own: pages of notebooks and of files beside `docs/`, and links that leave `docs/`.

On a code host a link such as `../tests/store/test_x.py` leads to the file. In the site it leads to a copy of the file,
below `source/`; links to folders become plain text. So the site is complete without a network.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PAGES = {"CHANGELOG.md": "changelog.md", "SECURITY.md": "threats.md"}
"""Files beside `docs/` -> their pages."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is no page of `docs/`: notebooks with their pictures, `PAGES`, and files that pages link to."""
    for notebook in sorted(EXAMPLES.glob("*.ipynb")):
        text, pictures = MarkdownExporter().from_notebook_node(
            nbformat.read(notebook, as_version=4), {"unique_key": notebook.stem, "output_files_dir": notebook.stem}
        )
        files.append(File.generated(config, f"examples/{notebook.stem}.md", content=text))
        for name, content in pictures["outputs"].items():
            files.append(File.generated(config, f"examples/{name}", content=content))
    for name, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text(encoding="utf-8")))
    for page in list(files.documentation_pages()):
        for _, _, target in _LINK.findall(page.content_string):
            path = _outside(page.src_uri, target.partition("#")[0])
            if path and (ROOT / path).is_file() and files.get_file_from_path(_uri(path)) is None:
                files.append(File.generated(config, _uri(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links that leave `docs/`; code blocks stay."""
    src = page.file.src_uri

    def moved(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        name, hash_, anchor = target.partition("#")
        new = _place(src, name, files)
        if new == name:
            return link[0]
        return f"{picture}[{text}]({new}{hash_}{anchor})" if new else text

    kept = _CODE.findall(markdown)
    parts = [_LINK.sub(moved, part) for part in _CODE.split(markdown)]
    return "".join(part + code for part, code in zip(parts, [*kept, ""], strict=True))


def _outside(src: str, target: str) -> str | None:
    """The path in the repository that a link leads to, if the link has to change for the site."""
    if not target or "://" in target or target.startswith("mailto:"):
        return None
    # These, and notebooks, stand elsewhere in the repository than in the site.
    folder = {
        **dict.fromkeys(PAGES.values(), "."),
        **{f"examples/{each.stem}.md": "examples" for each in EXAMPLES.glob("*.ipynb")},
    }
    base = folder.get(src, posixpath.join("docs", posixpath.dirname(src)))
    path = posixpath.normpath(posixpath.join(base, target))
    if path.startswith("..") or not (ROOT / path).exists():
        return None
    return None if base == "docs" and path.startswith("docs/") else path


def _place(src: str, target: str, files: Files) -> str:
    """Where a link leads in the site; the same where nothing has to change, empty where the site has no such place."""
    path = _outside(src, target)
    if path is None:
        return target
    uri = _uri(path)
    if files.get_file_from_path(uri) is None:
        return ""
    return posixpath.relpath(uri, posixpath.dirname(src) or ".")


def _uri(path: str) -> str:
    """Where a path of the repository is in the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("examples/") and path.endswith(".ipynb"):
        return path.replace(".ipynb", ".md")
    return {**PAGES, "README.md": "index.md"}.get(path, f"source/{path}")
