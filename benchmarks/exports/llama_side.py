"""What llama.cpp says of the same texts: a process that imports nothing of the project.

    python llama_side.py    reads {"model", "texts", "question", "tokens", "likeliest"} from stdin

Texts are given as text, so that llama.cpp's own tokenizer takes part. Writes, for each text, how many tokens it has
and (token, [(token, logprob) of the likeliest]) of each token of its greedy continuation; and the answer to the
question, in the chat format that the file itself holds.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import xllamacpp


def main() -> None:
    order = json.loads(sys.stdin.read())
    params = xllamacpp.CommonParams()
    params.model.path = order["model"]
    params.n_ctx = 2048
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    how: dict[str, Any] = {"temperature": 0, "seed": 0}
    texts = []
    for text in order["texts"]:
        given = {"prompt": text, "n_predict": order["tokens"], "n_probs": order["likeliest"], **how}
        answer = server.handle_completions(given)
        steps = [
            (step["id"], [(each["id"], each["logprob"]) for each in step["top_logprobs"]])
            for step in answer["choices"][0]["logprobs"]["content"]
        ]
        texts.append({"tokens_of_text": answer["usage"]["prompt_tokens"], "steps": steps})
    message = {"role": "user", "content": order["question"]}
    chat = server.handle_chat_completions({"messages": [message], "max_tokens": order["tokens"], **how})
    json.dump({"texts": texts, "chat": chat["choices"][0]["message"]["content"]}, sys.stdout)


if __name__ == "__main__":
    main()
