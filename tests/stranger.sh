#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Acts as a new user who follows the README: installs for C, JAX and PyTorch, each into its own folder,
# and runs a first program outside of the checkout.  `MAKE_TARGETS=stranger make test-chroot` does this
# on a bare system.
# usage: stranger.sh         PARTS="c jax torch" selects parts
#   CMAKE_ARGS=-DEPIC_CUDA=OFF       shortens the build on a machine with nvcc
set -eu
cd "$(dirname "$0")/.."
checkout=$PWD
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
unset EPIC_LIBRARY_PATH PYTHONPATH RANK WORLD_SIZE MASTER_ADDR MASTER_PORT

said() { # usage: said FILE WORDS; the file must contain the words
    grep -q "$2" "$1" || { cat "$1"; echo "stranger: \"$2\" was not printed"; exit 1; }
}

walk_c() {
    echo "== C"
    make install prefix="$here/c" >"$here/log" 2>&1 || { cat "$here/log"; exit 1; }
    lib=$(dirname "$(find "$here/c" -name libepic.so)")
    awk '/^```c$/ { on = 1; next } /^```$/ { on = 0 } on' docs/guide/quickstart.md >"$here/step.c"
    (cd "$here" && cc step.c -Ic/include -L"$lib" -lepic -Wl,-rpath,"$lib" -o step && ./step >out)
    said "$here/out" 'token 3 left as 4 and returned as 19'
    make uninstall >/dev/null
}

python_of() { # usage: python_of EXTRA; makes a new environment with the package and this extra
    python3 -m venv "$here/$1"
    "$here/$1/bin/pip" install -q --disable-pip-version-check "$checkout[$1]" >"$here/log" 2>&1 ||
        { tail -n 20 "$here/log"; exit 1; }
}

walk_jax() {
    echo "== JAX"
    python_of jax
    cat >"$here/own.py" <<'END'
import jax, numpy as np, epic.jax
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")), ("ep",))
group = epic.jax.open(mesh, "ep", max_tokens=4, max_row_bytes=4 * 8)
layer = epic.jax.Layer(num_experts=4, top_k=2)

def step(x, ids, weights):
    plan, rows, slot_weights = epic.jax.plan_dispatch(group, layer, ids, x, weights)
    return epic.jax.combine(plan, 2 * rows, slot_weights)

x = np.arange(64, dtype=np.float32).reshape(8, 8)
ids = np.array([[0, 3]] * 8, np.int32)
weights = np.full((8, 2), 0.5, np.float32)
sharded = jax.shard_map(step, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
print("right" if (jax.jit(sharded)(x, ids, weights) == 2 * x).all() else "wrong")
epic.jax.close(group)
END
    (cd "$here" && JAX_PLATFORMS=cpu jax/bin/python own.py >out 2>&1) || { cat "$here/out"; exit 1; }
    said "$here/out" '^right$'
}

walk_torch() {
    echo "== PyTorch"
    python_of torch
    cat >"$here/own.py" <<'END'
import sys, torch, epic.torch

with epic.torch.Group(max_tokens=8, max_row_bytes=4 * 8) as group:
    ranks = group.num_ranks
    layer = epic.torch.Layer(num_experts=4, top_k=2)
    x = torch.arange(64.0).reshape(8, 8).requires_grad_()
    ids, weights = torch.tensor([[0, 3]] * 8), torch.full((8, 2), 0.5)
    plan, rows, slot_weights = epic.torch.plan_dispatch(group, layer, ids, x, weights)
    out = epic.torch.combine(plan, 2 * rows, slot_weights)
    out.sum().backward()
    right = torch.equal(out, 2 * x) and (x.grad == 2).all()
    # one write per line, because two processes print
    sys.stdout.write(f"{'right' if right else 'wrong'} {ranks}\n")
END
    (cd "$here" && MASTER_PORT=29577 torch/bin/torchrun --nproc-per-node 2 --master-port 29577 own.py \
        >out 2>&1) || { cat "$here/out"; exit 1; }
    [ "$(grep -c '^right 2$' "$here/out")" = 2 ] || { cat "$here/out"; echo "stranger: not right"; exit 1; }
}

python3 -c 'import venv, ensurepip' 2>/dev/null || {
    [ "$(id -u)" = 0 ] && apt-get -qq install -y --no-install-recommends python3-venv >/dev/null
}
for part in ${PARTS:-c jax torch}; do walk_$part; done
echo "stranger: ${PARTS:-c jax torch}: arrived"
