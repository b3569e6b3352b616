"""A hook of mkdocs: a file outside docs/ that a page links to gets a page of its own, so that the link leads somewhere
on the site too.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parent.parent
LANGUAGES = {".py": "python", ".json": "json"}


def page_of(path: str) -> str:
    """Where the page of a file lies on the site."""
    return f"files/{path}.md"


def outside(page: str) -> re.Pattern[str]:
    """Links out of docs/ on a page: as many steps up as it lies deep, and one more."""
    return re.compile(rf"\]\((?:\.\./){{{page.count('/') + 1}}}(?!\.\./)([^)#]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages: out of the navigation and of the search, which would otherwise find code before prose."""
    pages = [page for page in files.documentation_pages() if page.inclusion.is_included()]
    for path in sorted({path for page in pages for path in outside(page.src_uri).findall(page.content_string)}):
        language = LANGUAGES.get(Path(path).suffix, "text")
        content = (
            "---\nsearch:\n  exclude: true\n---\n\n#"
            f" `{path}`\n\n````{{.{language} .file}}\n{(ROOT / path).read_text(encoding='utf-8')}\n````\n"
        )
        files.append(File.generated(config, page_of(path), content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads links out of docs/ to those pages."""
    name = page.file.src_uri
    return outside(name).sub(lambda match: f"]({'../' * name.count('/')}{page_of(match[1])})", markdown)
