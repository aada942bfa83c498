#!/bin/sh
# Fetches the console's libraries by npm and puts what is needed of them, with their licences, where they are served from:
# app/console/vendor.sh. The files are checked in; run it again after changing a version here.
set -eu
cd "$(dirname "$0")/../.."
served=app/console/static/vendor
tests=tests/console/vendor
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fetch() { # NAME VERSION
  (cd "$work" && npm pack --silent "$1@$2" >/dev/null && mkdir "$1" && tar xzf "$1-$2.tgz" -C "$1" --strip-components 1)
}

fetch preact 11.2.0
fetch htm 3.1.1
fetch uplot 1.6.32
fetch axe-core 4.14.1

mkdir -p "$served" "$tests"
# Browsers resolve only addresses, so the name of a package becomes one; maps of the sources are not shipped.
plain() { sed -e 's#from"preact"#from"./preact.js"#g' -e '/^\/\/# sourceMappingURL=/d' "$1"; }
plain "$work/preact/dist/preact.mjs" >"$served/preact.js"
plain "$work/preact/hooks/dist/hooks.mjs" >"$served/preact-hooks.js"
plain "$work/htm/dist/htm.module.js" >"$served/htm.js"
plain "$work/uplot/dist/uPlot.esm.js" >"$served/uplot.js"
cp "$work/uplot/dist/uPlot.min.css" "$served/uplot.css"
for name in preact htm uplot; do cp "$work/$name/LICENSE" "$served/$name.LICENSE"; done
cp "$work/axe-core/axe.min.js" "$tests/axe.min.js"
cp "$work/axe-core/LICENSE" "$tests/axe-core.LICENSE"
ls -l "$served" "$tests"
