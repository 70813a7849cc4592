"""What `logra COMMAND --help` shows at its end."""

TRAIN = """\
examples:
  logra train configs/quickstart.yaml
  logra train configs/quickstart.yaml train.steps=2 run_dir=runs/try
  logra train configs/quickstart.yaml sketch.rank=64 kl.budget=constant kl.start=5e-3
  logra train configs/quickstart.yaml resume=runs/quickstart-20260101-120000
the baselines, in the same loop: adamw, lora, galore
  logra train configs/quickstart.yaml optimizer.kind=galore optimizer.projection_gap=6
ended by an alarm, with exit status 3, a checkpoint, and the best one as the model:
  logra train configs/quickstart.yaml 'monitor.stop_on=[eval_drop, repetition]'
one run of several processes, on one mesh of all their devices; SLURM, Kubernetes and
Open MPI start them, or you do, each with its own distributed.process:
  srun logra train CONFIG mesh.fsdp=16 distributed.enabled=true
  logra train CONFIG mesh.fsdp=16 distributed.enabled=true \\
      distributed.coordinator=HOST:PORT distributed.processes=2 distributed.process=0
"""
SERVE = """\
examples:
  logra serve configs/quickstart.yaml serve.python=sgl/bin/python
  logra serve configs/quickstart.yaml serve.tp=2 'serve.args=[--log-level, debug]'
then, in another terminal:
  logra train configs/quickstart.yaml rollout.engine=sglang \\
      'rollout.urls=[http://127.0.0.1:30000]'
"""
EVAL = """\
The same weights give the same numbers from a run, its checkpoint and its export (but
for LoRA, which the export rounds). With rollout.engine=sglang the servers at
rollout.urls are given the weights, and keep them: do not take those of a run.

examples:
  logra eval configs/quickstart.yaml eval.samples=1024
  logra eval runs/quickstart-20260101-120000 --best
  logra eval my-model --config configs/quickstart.yaml --samples answers.jsonl
  logra eval configs/quickstart.yaml --json eval.samples_per_question=16 \\
      'eval.pass_at=[1, 4, 16]' eval.temperature=0.6 eval.top_p=0.95
  logra eval my-model --config configs/quickstart.yaml rollout.engine=sglang \\
      'rollout.urls=[http://127.0.0.1:30000]'
"""
EXPORT = """\
examples:
  logra export runs/quickstart-20260101-120000 my-model
  logra export runs/quickstart-20260101-120000 my-best-model --best
"""
REPORT = """\
The page needs no network and no other file: open it, mail it, print it. An older report
of the same name is replaced; any other file is not.

examples:
  logra report runs/quickstart-20260101-120000
  logra report runs/grpo-0 runs/grpo-1 runs/rloo-0 runs/rloo-1 --out grpo-or-rloo.html
"""
REPLAY = """\
examples:
  logra train configs/quickstart.yaml train.save_updates=true run_dir=runs/kept
  logra replay path/to/base-model runs/kept/updates my-model
"""
PLAN = """\
No weights are needed: the step is compiled for shapes alone, on virtual devices of the
CPU, or with `--gpu` by a GPU's compiler. That takes JAX's CUDA plugin and NVIDIA's
assembler, but no GPU; with `model.attention=flash` cuDNN too (`pip install
nvidia-cudnn-cu12`), whose workspace is not counted: it is known on a GPU only. Products
are then cuBLAS's; a run tries Triton's as well. (Where there is no GPU, other programs
find the plugin too, and JAX logs an error before it takes the CPU:
`JAX_PLATFORMS=cpu`.)

`model.preset=NAME` plans for a well-known model in place of the config's. GaLore is
left out: its SVDs work in memory that the compiler does not count.

examples:
  logra plan configs/plan-7b.yaml
  logra plan configs/plan-7b.yaml --devices 4 --card L40S-48GB
  logra plan configs/plan-7b.yaml --devices 4 --gpu H100
  logra plan configs/quickstart.yaml --devices 4 --card 24 --json \\
      model.preset=qwen2.5-1.5b model.remat=layer
"""
BENCH = """\
examples:
  logra bench rollout configs/quickstart.yaml
  logra bench rollout configs/quickstart.yaml rollout.max_new_tokens=64 --json
  logra bench merge configs/quickstart.yaml
"""
STEP = """\
No weights are needed: they are random. `model.preset=NAME` measures a well-known shape.

examples:
  logra bench step configs/quickstart.yaml sketch.rank=64 kl.share=0.0625
  logra bench step configs/quickstart.yaml --tokens 4096 --json \\
      model.preset=qwen3-0.6b model.remat=layer model.activations=null
"""
SYNC = """\
The weights of the servers at rollout.urls are changed, and left so. Where there are
none, a server is started as the section `serve` says, and stopped. All weights go
through files in rollout.share_dir (null: the temporary directory), which the servers
must see too; on one machine, files just written are read from memory.

examples:
  logra bench sync configs/quickstart.yaml serve.python=sgl/bin/python
  logra bench sync configs/quickstart.yaml --repeat 9 --json \\
      rollout.engine=sglang 'rollout.urls=[http://127.0.0.1:30000]'
"""
OVERLAP = """\
The config is trained twice, for a few steps each: one batch ahead and synchronously.
The weights of the servers at rollout.urls are changed, and left so. Where there are
none, a server is started as the section `serve` says, and stopped. Run directories are
made in rollout.share_dir (null: the temporary directory), and removed.

examples:
  logra bench overlap configs/quickstart.yaml serve.python=sgl/bin/python
  logra bench overlap configs/quickstart.yaml --steps 12 --json \\
      rollout.pause=in_place rollout.engine=sglang \\
      'rollout.urls=[http://127.0.0.1:30000]'
"""
LOAD = """\
Without CONFIG or DIR a synthetic checkpoint of 2 GB is written into the temporary
directory, and removed.

examples:
  logra bench load
  logra bench load path/to/model --repeat 9 --json
  logra bench load configs/quickstart.yaml --dtype float32
"""
FIDELITY = """\
examples:
  logra fidelity
  logra fidelity --rank 4 8 16 32 --seeds 1 --plot fidelity.png
"""
SPECTRUM = """\
examples:
  logra spectrum configs/quickstart.yaml
  logra spectrum configs/quickstart.yaml sketch.rank=64 --energy 0.8 0.99 --json
"""
COMPARE = """\
Each run has a process of its own, one after the other. What is done is kept: the same
command goes on after Ctrl-C, SIGTERM or a crash, and adds seeds or labels that are new.
A run that fails is recorded, with its phase, and the study goes on (exit status 1).
STUDY is a YAML file: `config`, `set`, `seeds`, `axes`, `baseline`, `plan` and
`reconstruction`; those of configs/studies explain themselves.

examples:
  logra compare configs/studies/methods.yaml
  logra compare configs/studies/rank.yaml 'seeds=[0]' train.steps=4 --out studies/try
  logra compare configs/studies/rank.yaml 'axes.sketch.rank=[8, 32]'
  logra compare configs/studies/methods.yaml model.path=Qwen/Qwen2.5-0.5B-Instruct
"""
