# SPDX-License-Identifier: Apache-2.0
# `make docs` builds the documentation as a site in build/docs/site. It makes the references from the
# header and the docstrings, and fails at a dead link. To read the site, run
# `python3 -m http.server -d build/docs/site`.
.PHONY: docs
DOCS_PYTHON ?= python3
docs:
	@tests/docs.sh $(or $(CC),cc)
	@mkdir -p build/docs
	@cmp -s docs/requirements.txt build/docs/requirements.txt || \
	    { $(DOCS_PYTHON) -m venv --clear build/docs/venv && \
	    build/docs/venv/bin/pip install -q --disable-pip-version-check -r docs/requirements.txt && \
	    cp docs/requirements.txt build/docs/requirements.txt; }
	@build/docs/venv/bin/python tools/site.py build/docs
	@cd build/docs && NO_MKDOCS_2_WARNING=1 venv/bin/mkdocs build --strict >log 2>&1 || { grep -v '^INFO' log; exit 1; }
	@echo "the site: build/docs/site/index.html"
