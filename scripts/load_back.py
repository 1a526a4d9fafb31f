"""Load one published checkpoint by its subfolder and let it answer.

python scripts/load_back.py published qwen_mbpp_nobuf_lr1e6/global_step_30
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

repo, subfolder = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(repo, subfolder=subfolder)
tokenizer = AutoTokenizer.from_pretrained(repo, subfolder=subfolder)
turn = [{"role": "user", "content": "Write a Python function add(a, b). Code only."}]
inputs = tokenizer.apply_chat_template(
    turn, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
reply = model.generate(**inputs, max_new_tokens=48, do_sample=False)
print(f"{subfolder}: {model.num_parameters():,} parameters, {model.dtype}")
print(tokenizer.decode(reply[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
