"""Trains the byte-level BPE on the generator's own text and writes the tokenizer files of a Hugging Face folder.

    python tokenizer.py --out DIR

1,024 tokens: 5 special ones, 256 bytes and the merges. Digits stay single, so that numbers are copied and added digit by digit.
Three bytes that no text in UTF-8 has gave their rows to the markers of tools, so that the ids of everything else stayed.
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

# (what a byte is called in the vocabulary, the marker that has its row, special): 0xFD, 0xFE and 0xFF.
MARKERS = [("ý", "<tool_call>", False), ("þ", "</tool_call>", False), ("ÿ", "<|tool|>", True)]

# A tool is shown as the first sentence of its description and the call of it, with types where the values belong: what a call
# needs can be copied from there.
CHAT_TEMPLATE = (
    "{% macro kind(schema) %}"
    "{% if schema is not mapping %}any"
    "{% elif schema['enum'] is sequence and schema['enum'] %}{% for value in schema['enum'] %}{{ '|' if not loop.first }}{{ value | tojson }}{% endfor %}"
    "{% elif schema['type'] == 'array' %}[{{ kind(schema['items']) }}]"
    "{% elif schema['properties'] is mapping %}"
    "{% set needed = schema['required'] if schema['required'] is sequence and schema['required'] else [] %}"
    "{{ '{' }}"
    "{% for name, value in schema['properties'] | items %}"
    "{{ ', ' if not loop.first }}{{ name | tojson }}: {{ kind(value) }}{{ '?' if name not in needed }}"
    "{% endfor %}"
    "{{ '}' }}"
    "{% elif schema['type'] is string %}{{ schema['type'] }}"
    "{% elif schema['type'] is sequence and schema['type'] %}{{ schema['type'] | join('|') }}"
    "{% else %}any{% endif %}"
    "{% endmacro %}"
    "{{ bos_token }}"
    "{% if tools %}"
    "{{ '<|system|>' }}"
    "{% if messages and messages[0]['role'] == 'system' and messages[0]['content'] | trim %}{{ messages[0]['content'] | trim + '\n\n' }}{% endif %}"
    "{{ 'Tools:' }}"
    "{% for tool in tools %}"
    "{% set about = ((tool['function']['description'] or '') | trim).split('\n')[0].split('. ')[0] %}"
    "{{ '\n' + (about + ' ' if about else '') + '{\"name\": ' + tool['function']['name'] | tojson + ', \"arguments\": ' }}"
    "{% if tool['function']['parameters'] is mapping and tool['function']['parameters']['properties'] is mapping %}{{ kind(tool['function']['parameters']) }}"
    "{% else %}{{ '{}' }}{% endif %}"
    "{{ '}' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('Roles are system, user, assistant and tool, not ' + message['role']) }}"
    "{% endif %}"
    "{% if not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') | trim }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\n' if message['content'] or not loop.first }}"
    "{{ '<tool_call>\n{\"name\": ' + call['function']['name'] | tojson + ', \"arguments\": ' }}"
    "{{ call['function']['arguments'] if call['function']['arguments'] is string else call['function']['arguments'] | tojson }}"
    "{{ '}\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endif %}"
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
    return with_markers(tok)


def with_markers(tok):
    """The markers of tools in the rows of `MARKERS`' bytes."""
    f = json.loads(tok.to_str())
    vocab, added = f["model"]["vocab"], f["added_tokens"]
    for byte, marker, special in MARKERS:
        if byte not in vocab:
            continue
        vocab[marker] = vocab.pop(byte)
        added.append({"id": vocab[marker], "content": marker, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special})
    f["model"]["vocab"] = dict(sorted(vocab.items(), key=lambda entry: entry[1]))
    added.sort(key=lambda token: token["id"])
    return Tokenizer.from_str(json.dumps(f))


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
