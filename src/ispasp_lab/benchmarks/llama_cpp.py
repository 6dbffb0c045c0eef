"""llama.cpp itself, through the npm package node-llama-cpp, which ships its binaries.

`npm install node-llama-cpp` in any folder, and ISPASP_LLAMA_CPP names that folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ispasp.errors import InputError, MissingExtraError

FOLDER = "ISPASP_LLAMA_CPP"
_LIMIT = 600  # seconds of one question
_SCRIPT = """
import fs from "node:fs";
const {home, file, out, texts, ids, count} = JSON.parse(process.argv[2]);
const {getLlama, LlamaLogLevel} = await import(home);
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error});
const model = await llama.loadModel({modelPath: file});
const kind = {experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32"};
const context = await model.createContext({contextSize: 256, threads: 1, flashAttention: false, ...kind});
const sequence = context.getSequence();
const wanted = {generateNext: {logits: true, token: true, options: {temperature: 0}}};
const tokens = texts.map((text) => model.tokenize(text, true)), greedy = [];
let heard = await sequence.controlledEvaluate(ids.map((id) => [id, wanted]));
const rows = heard.map(({next: {logits}}) => Float32Array.from({length: logits.size}, (_, i) => logits.get(i)));
fs.writeFileSync(out, Buffer.concat(rows.map((row) => Buffer.from(row.buffer))));
while (greedy.length < count) {
    greedy.push(heard.at(-1).next.token);
    heard = await sequence.controlledEvaluate([[greedy.at(-1), wanted]]);
}
console.log(JSON.stringify({tokens, greedy}));
process.exit(0);
"""


@dataclass(frozen=True, eq=False)
class Answer:
    """Logits after each token of the prompt (T, vocabulary), the greedy continuation, and the tokens of each text."""

    logits: Tensor
    greedy: list[int]
    tokens: list[list[int]]


def _package() -> Path:
    return Path(os.environ.get(FOLDER) or ".").resolve() / "node_modules" / "node-llama-cpp"


def version() -> str:
    """The release of llama.cpp that the package ships."""
    found = _package() / "llama" / "llama.cpp.info.json"
    return str(json.loads(found.read_text(encoding="utf-8")).get("tag", "")) if found.is_file() else ""


def absent() -> str:
    """Why llama.cpp cannot be asked; empty if it can."""
    if not shutil.which("node"):
        return "node is not installed"
    if not _package().is_dir():
        return f"needs llama.cpp: npm install node-llama-cpp in a folder, and set {FOLDER} to that folder"
    return ""


def ask(file: Path, ids: Sequence[int], count: int = 0, texts: Sequence[str] = ()) -> Answer:
    """Load a GGUF file in llama.cpp, evaluate the prompt, continue it greedily by `count` tokens, tokenize texts."""
    reason = absent()
    if reason:
        raise MissingExtraError(reason)
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder) / "ask.mjs", Path(folder) / "logits"
        script.write_text(_SCRIPT)
        home = str(_package() / "dist" / "index.js")
        request = {"home": home, "file": str(file.resolve()), "out": str(out), "texts": texts}
        line = [str(shutil.which("node")), str(script), json.dumps(request | {"ids": list(ids), "count": count})]
        done = subprocess.run(line, capture_output=True, text=True, timeout=_LIMIT, check=False)  # noqa: S603
        if done.returncode:
            raise InputError(f"llama.cpp does not run {file} ({done.stderr.strip()[-500:]}): export it again")
        told = json.loads(done.stdout.splitlines()[-1])
        logits = torch.frombuffer(bytearray(out.read_bytes()), dtype=torch.float32).view(len(ids), -1)
    return Answer(logits, told["greedy"], told["tokens"])
