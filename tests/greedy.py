"""Greedy completions of 64 held-out chain sums by a saved model, in transformers and in plain vLLM; prints JSON.

python tests/greedy.py FOLDER
"""

import itertools
import json
import os
import sys

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}

import conftest  # noqa: F401 (the path)
import task
from transformers import AutoModelForCausalLM, AutoTokenizer

if __name__ == "__main__":
    folder = sys.argv[1]
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    prompts = [row["prompt"] for row in itertools.islice(task.held_out_rows(3), 64)]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    output = model.generate(inputs.input_ids, attention_mask=inputs.attention_mask, do_sample=False, max_new_tokens=64)
    by_transformers = []
    for ids in output[:, inputs.input_ids.shape[1] :].tolist():
        end = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else len(ids)
        by_transformers.append(ids[:end])

    import vllm

    llm = vllm.LLM(folder, dtype="float32", enforce_eager=True, max_model_len=128)
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=64)
    outputs = llm.generate(
        [{"prompt_token_ids": tokenizer.encode(prompt)} for prompt in prompts], sampling, use_tqdm=False
    )
    by_vllm = [list(output.outputs[0].token_ids) for output in outputs]
    print("RESULT " + json.dumps({"vllm": by_vllm, "transformers": by_transformers}), flush=True)
    os._exit(0)
