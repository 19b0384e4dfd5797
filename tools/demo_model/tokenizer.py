"""Trains the byte-level BPE on the generator's own text and writes the tokenizer files of a Hugging Face folder.

    python tokenizer.py --out DIR

1,024 tokens: 5 special ones, 256 bytes and the merges. Digits stay single, so that numbers are copied and added digit by digit.
"""

import argparse
import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from generate import BEGIN, END, ROLES, conversation, strip
from stories import story

VOCAB = 1024
SEED = "tokenizer/1"
SPECIAL = [BEGIN, END] + [f"<|{role}|>" for role in ROLES]
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Roles are system, user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def corpus(conversations=4000):
    rng = random.Random(SEED)
    for i in range(conversations):
        if i % 3 == 0:
            yield story(rng)[0]
        for _, text, _ in conversation(rng, 512).messages:
            yield strip(text)


def train():
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tok.train_from_iterator(corpus(), trainer)
    tok.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, tok.token_to_id(BEGIN))])
    return tok


def write(tok, out: Path):
    out.mkdir(parents=True, exist_ok=True)
    tok.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True)
    a = p.parse_args()
    tok = train()
    write(tok, a.out)
    text = " ".join(t for _, t, _ in conversation(random.Random(1), 2048).messages)
    ids = tok.encode(strip(text)).ids
    print(f"{tok.get_vocab_size()} tokens; {len(strip(text)) / len(ids):.2f} characters per token")


if __name__ == "__main__":
    main()
