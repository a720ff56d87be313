#!/usr/bin/env bash
# A Llama of `transformers` is trained on one mesh, killed, resumed on another, exported, and loaded by `transformers`
# again, which continues a text as meshwork does. docs/huggingface.md shows what this prints.
#
#   MESHWORK_PEER_PYTHON=python scripts/session_llama.sh [FOLDER]     # a Python that has torch and transformers
set -euo pipefail
cd "$(dirname "$0")/.."
python=${MESHWORK_PEER_PYTHON:-python3}
folder=${1:-target/session_llama}
rm -rf "$folder"
mkdir -p "$folder"
cargo build --locked --quiet --release --example gpt_train --example generate
PATH=$PWD/target/release/examples:$PATH
cd "$folder"
export HF_HUB_DISABLE_PROGRESS_BARS=1 HF_HUB_OFFLINE=1

python() { # Shows the command, and runs it.
    printf '$ python %s\n' "$*"
    "$python" "$@"
}

cat >make.py <<'END'
import torch
from transformers import LlamaConfig, LlamaForCausalLM, logging

logging.disable_progress_bar()
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
)).save_pretrained("llama")
END
cat >continue.py <<'END'
import torch
from transformers import AutoModelForCausalLM, logging

logging.disable_progress_bar()
model = AutoModelForCausalLM.from_pretrained("tuned", dtype=torch.float32).eval()
ids = torch.tensor([list(b"Lorem ipsum")])
with torch.no_grad():
    print(bytes(model.generate(ids, max_new_tokens=50, do_sample=False)[0].tolist()).decode())
END

python make.py
train=(gpt_train --set model.init_from=llama --set model.seq_len=64 --set checkpoint.dir=run --set checkpoint.every=50
    --set optimizer.lr=3e-3 --steps 400)
# Killed when the checkpoint of step 200 is there.
printf '$ %s &\n' "${train[*]} --mesh dp=2,tp=2"
"${train[@]}" --mesh dp=2,tp=2 >first.txt 2>&1 &
child=$!
until [[ -e run/step-00000200 ]]; do
    kill -0 "$child" 2>/dev/null || { cat first.txt >&2; exit 1; }
    sleep 0.01
done
printf '$ kill -9 %%1\n'
kill -9 "$child"
wait "$child" 2>/dev/null || true
head -n 2 first.txt
echo ...
tail -n 2 first.txt

export=(--mesh pp=2 --set checkpoint.resume=true --set checkpoint.export=tuned)
printf '$ %s\n' "${train[*]} ${export[*]}"
"${train[@]}" "${export[@]}" >second.txt
head -n 2 second.txt
echo ...
sed -n '/^step 400/,/exported/p' second.txt

printf '$ %s\n' 'generate --model tuned --prompt "Lorem ipsum" --tokens 50 --temperature 0'
generate --model tuned --prompt "Lorem ipsum" --tokens 50 --temperature 0 2>/dev/null | tee ours.txt
python continue.py | tee theirs.txt
diff ours.txt <(tail -n +2 theirs.txt)
echo "the same text"
