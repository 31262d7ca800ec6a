# Every target makes what it needs in .venv first; PYTHON names the Python whose torch and Triton it uses.
PYTHON ?= python3
VENV := .venv/bin/python
TYPED := .venv/typed

.PHONY: demo test test-sglang lint clean

demo:
	@$(PYTHON) .ci/setup_venv.py
	.venv/bin/dsv4 replay

test:
	@$(PYTHON) .ci/setup_venv.py test
	$(VENV) -m pytest -n auto
	TRITON_INTERPRET=1 $(VENV) -m pytest -n auto -m interpreter

# SGLang's own backend beside ours, on a CPU. Skipped, with a line that says so, where SGLang cannot be had.
test-sglang:
	@$(PYTHON) .ci/setup_venv.py test
	@$(VENV) .ci/sglang_venv.py; status=$$?; if [ $$status -eq 75 ]; then exit 0; fi; [ $$status -eq 0 ] || exit $$status; \
	TRITON_INTERPRET=1 SGLANG_FP8_PAGED_MQA_LOGITS_TORCH=1 PYTHONPATH=tests/with_sglang/stubs \
	.venv-sglang/bin/python -W ignore -m pytest tests/with_sglang

lint:
	@$(PYTHON) .ci/setup_venv.py test dev
	$(VENV) -m ruff check .
	$(VENV) -m ruff format --check .
	@mkdir -p $(TYPED)
	@for folder in triton_kernels graph_runner bench examples; do ln -sfn ../../$$folder $(TYPED)/dsv4_$$folder; done
	$(VENV) -m mypy

clean:
	rm -rf .venv .venv-sglang build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
