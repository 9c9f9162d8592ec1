"""Small tokenizers, and a router over a scripted cluster, for the tests of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import httpx
import tokenizers
from fastapi import FastAPI
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from virtual_time import settle

from protocol.generation import GenerationRequest
from protocol.ids import Role
from router import Router, RouterSettings, Tokenizer, build_app
from router.chat_template import ChatTemplate
from router.scripted import ScriptedCluster
from router.scripted_worker import EOS, ScriptedWorker

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODEL = "org/tiny"
MAX_MODEL_LEN = 512


def byte_level_backend() -> tokenizers.Tokenizer:
    """Byte-level BPE as GPT-2's, Llama 3's and Qwen's: every byte is a token, and a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: n for n, char in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("\u0120", "w"), ("\u00f0", "\u0141")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", backend.token_to_id("<|bos|>"))]
    )
    return backend


def byte_fallback_backend() -> tokenizers.Tokenizer:
    """Sentencepiece-like BPE as Llama 2's and Gemma's: spaces are \u2581, unknown text is bytes."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for char in "\u2581abcdefghijklmnopqrstuvwxyz.,!\u00e9":
        vocab[char] = len(vocab)
    merges = [("h", "e"), ("l", "l"), ("\u2581", "w")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return backend


def byte_level_tokenizer(template: str | None = CHATML) -> Tokenizer:
    tokens = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    return Tokenizer(byte_level_backend(), ChatTemplate(template, tokens) if template else None)


SETTINGS = RouterSettings(
    request_timeout_s=60.0,
    worker_wait_s=5.0,
    retry_backoff_s=0.0,
    poll_interval_s=0.01,
    reconnect_backoff_s=0.01,
    absent_grace_s=0.05,
    metrics_timeout_s=0.05,
    canary_interval_s=3600.0,
)


@dataclass(slots=True)
class Bench:
    """A started router over scripted workers that all answer with `text`."""

    router: Router
    cluster: ScriptedCluster
    tokenizer: Tokenizer
    app: FastAPI

    def client(self, **headers: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://router", headers=headers)

    def workers(self, role: Role) -> list[ScriptedWorker]:
        return [w for w in self.cluster.workers_by_identity.values() if w.record.role is role]

    @property
    def prefill(self) -> ScriptedWorker:
        return self.workers(Role.PREFILL)[0]

    @property
    def decode(self) -> ScriptedWorker:
        return self.workers(Role.DECODE)[0]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something has come about; bounded."""
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def all_usable(self) -> None:
        alive = [w for w in self.cluster.workers_by_identity.values() if w.is_alive]
        workers = self.router.workers
        await self.until(
            lambda: len(workers.prefill_workers()) + len(workers.decode_workers()) == len(alive)
        )


def script_of(
    tokenizer: Tokenizer, texts: Callable[[GenerationRequest], str]
) -> Callable[[GenerationRequest], Sequence[int]]:
    """Answers every request with its text; the canary's, which may not end, with that again and again."""

    def script(request: GenerationRequest) -> Sequence[int]:
        ids = list(tokenizer.encode(texts(request), add_special_tokens=False))
        return ids * 50 if request.sampling.ignore_eos else [*ids, EOS]

    return script


@asynccontextmanager
async def bench(
    text: str = "hello world",
    num_prefill: int = 1,
    num_decode: int = 1,
    texts: Callable[[GenerationRequest], str] | None = None,
    **changes: object,
) -> AsyncIterator[Bench]:
    """A running router; at the end nothing may be left anywhere. `changes` are settings.

    `texts`: the answer to each request of one choice, where it is not always `text`.
    """
    tokenizer = byte_level_tokenizer()
    eos_id = tokenizer.backend.token_to_id("<|eos|>") or 0
    cluster = ScriptedCluster(script_of(tokenizer, texts or (lambda request: text)), eos_id)
    for role, num_workers in ((Role.PREFILL, num_prefill), (Role.DECODE, num_decode)):
        for _ in range(num_workers):
            cluster.add_worker(role)
    router = Router(
        settings=replace(SETTINGS, **changes),  # type: ignore[arg-type]
        directory=cluster,
        tokenizer=tokenizer,
        served_model_name=MODEL,
        max_model_len=MAX_MODEL_LEN,
        cluster_token="secret",
        connect=cluster,
        clock=asyncio.get_running_loop().time,
    )
    await router.start()
    running = Bench(router, cluster, tokenizer, build_app(router))
    try:
        await running.all_usable()
        if num_prefill and num_decode:
            await running.until(lambda: router.not_ready_because() is None)
        for worker in cluster.workers_by_identity.values():
            worker.requests.clear()  # the canary's
            worker.tickets.clear()
            worker.num_first_tokens.clear()
        yield running
        await settle()  # a canary that has its last token
        router.assert_idle()
        cluster.assert_idle()
    finally:
        await router.stop()
    assert all(connection.is_closed for connection in cluster.connections)
