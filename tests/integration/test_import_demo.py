"""The demo model's import against transformers' own reading of the same GGUF file."""

import random
import unicodedata
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from headrace.registry import demo
from headrace.registry.importer import prepare
from headrace.registry.progress import silent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("demo")
    prepared = prepare("demo", scratch, silent)
    assert prepared.name == "smollm2-135m-instruct"
    assert prepared.licence == "apache-2.0"
    return scratch


def test_every_tensor_is_what_transformers_reads(imported: Path) -> None:
    path = demo.find().path
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    actual = load_file(imported / "model.safetensors")
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor.to(torch.bfloat16)), name


def test_every_text_has_the_ids_that_transformers_gives_and_comes_back(imported: Path) -> None:
    path = demo.find().path
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer = AutoTokenizer.from_pretrained(imported)
    rng = random.Random(11)
    letters = [chr(code) for code in range(32, 0x3000) if unicodedata.category(chr(code))[0] in "LPSZ"]
    texts = [
        "Hello, world! It's 1234 o'clock; they'd SAY 'no'.",
        "def f(x):\n\treturn x ** 2  # square\n\n\nclass A:\n    pass\n",
        "日本語 中文 한국어 العربية हिन्दी ไทย Ελληνικά русский",
        "🙂👩‍👩‍👧‍👦🇩🇪 e\u0301 ﬁ \u00a0 \u3000 \r\n \x00\x01",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        "",
        *("".join(rng.choices([*letters, " ", "\n", "7"], k=rng.randrange(1, 60))) for _ in range(300)),
    ]
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert ids == reference(text)["input_ids"], text
        assert tokenizer.decode(ids) == text
    assert tokenizer.chat_template == reference.chat_template
    assert tokenizer.eos_token_id == reference.eos_token_id


def test_digits_are_split_one_by_one_as_the_models_own_rule_says(imported: Path) -> None:
    # transformers' reader does not look at the rule's name, and joins a space with a digit that is not ASCII.
    tokenizer = AutoTokenizer.from_pretrained(imported)
    assert tokenizer.tokenize(" ²") == [*tokenizer.tokenize(" "), *tokenizer.tokenize("²")]
