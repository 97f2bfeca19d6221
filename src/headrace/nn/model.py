"""The decoder: embedding, layers, head, on a ragged batch over a paged cache."""

from dataclasses import dataclass

import torch

from headrace.nn.batch import StepBatch
from headrace.nn.config import ModelConfig
from headrace.nn.kv import KVCache
from headrace.nn.ops.interface import HeadNorms, Ops
from headrace.nn.ops.linear import Gated, Linear
from headrace.nn.rope import Rotary
from headrace.nn.step import Step


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer; projections that read the same input are packed into one."""

    input_norm: torch.Tensor
    qkv: Linear
    head_norms: HeadNorms | None
    attention_output: Linear
    mlp_norm: torch.Tensor
    gate_up: Gated
    down: Linear
    window: int | None

    @property
    def num_bytes(self) -> int:
        norms = [self.input_norm, self.mlp_norm]
        if self.head_norms is not None:
            norms += [self.head_norms.query, self.head_norms.key]
        products = (self.qkv.num_bytes, self.attention_output.num_bytes, self.gate_up.num_bytes, self.down.num_bytes)
        return sum(norm.nbytes for norm in norms) + sum(products)


class CausalLM:
    """A Llama-like decoder with loaded weights. Not safe for calls from several threads at once."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        embedding: torch.Tensor,
        layers: list[Layer],
        final_norm: torch.Tensor,
        head: Linear,
        *,
        head_is_embedding: bool,
    ) -> None:
        self.config = config
        self._ops = ops
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._head_is_embedding = head_is_embedding
        self._rotary = Rotary(config.rope, config.head_dim, embedding.device)

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def weight_bytes(self) -> int:
        """Bytes of the weights as loaded; storage that the head shares with the embedding counts once."""
        head = 0 if self._head_is_embedding else self._head.num_bytes
        return self._embedding.nbytes + self._final_norm.nbytes + head + sum(layer.num_bytes for layer in self._layers)

    def prepare(self, block_size: int) -> None:
        """Compile what caches of ``block_size`` need, seconds of work at most, so that no step waits for it."""
        self._ops.prepare(block_size)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: KVCache) -> torch.Tensor:
        """Compute the step: write its keys and values to ``kv`` and return ``[num_rows, vocab_size]`` logits.

        Raises:
            ValueError: the batch points outside the vocabulary, the positions or the cache; nothing was written.
        """
        config, ops = self.config, self._ops
        batch.check(
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
        )
        step = Step.of(batch, self._rotary, kv.block_size, self.device)
        residual = self._embedding[step.token_ids]
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(ops.norm(residual, layer.input_norm))
            attended = ops.attention(qkv, layer.head_norms, step, kv, index, layer.window)
            if index == len(self._layers) - 1 and step.logit_rows is not None:
                if not len(step.logit_rows):
                    return residual.new_empty(0, config.vocab_size)
                # Nothing after the last attention mixes tokens: go on with the rows that are asked for.
                residual, attended = residual[step.logit_rows], attended[step.logit_rows]
            layer.attention_output.add_to(residual, attended)
            layer.down.add_to(residual, layer.gate_up(ops.norm(residual, layer.mlp_norm)))
        return self._head(ops.norm(residual, self._final_norm))
