"""The page as one script: joined by rules, run in node, and allowed by its own policy."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from attlas.view import bundle
from attlas.view.packing import levels_that_fit

STATIC = Path(bundle.__file__).parent / "static"
node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def run(code: str, tmp_path: Path) -> object:
    file = tmp_path / "run.mjs"
    file.write_text(code, encoding="utf-8")
    done = subprocess.run(["node", file], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def modules() -> list[str]:
    return [path.relative_to(STATIC).with_suffix("").as_posix() for path in STATIC.rglob("*.js")]


SERVED = ("boot", "corpus/boot", "closed/boot")


def test_every_module_is_in_some_page() -> None:
    joined = [bundle.widget_module(), bundle.script("offline.js"), bundle.script("live/page.js")]
    joined += [bundle.script("corpus/offline.js"), *map(bundle.served_script, SERVED)]
    defined = set(re.findall(r"^const \$(\w+) = \(\(\) => \{$", "".join(joined), re.M))
    assert not {path for path in modules() if path.replace("/", "_") not in defined}


def test_a_module_stands_behind_those_that_it_imports() -> None:
    text = bundle.script("main.js")
    order = re.findall(r"^const \$(\w+) = \(\(\) => \{$", text, re.M)
    assert len(order) == len(set(order)) > 40
    for path in (path for path in modules() if path.replace("/", "_") in order):
        for imported in re.findall(r'from "(\.[\w./]+)\.js"', (STATIC / f"{path}.js").read_text("utf-8")):
            target = (STATIC / path).parent.joinpath(imported).resolve().relative_to(STATIC).as_posix()
            assert order.index(target.replace("/", "_")) < order.index(path.replace("/", "_"))


def test_only_comments_are_left_out() -> None:
    def statements(text: str) -> set[str]:
        """Return the lines of a text that hold more than a comment, without comments in front of them."""
        return {line.strip() for line in re.sub(r"/\*\*.*?\*/", "", text, flags=re.S).splitlines()}

    for path in modules():
        file = f"{path}.js"
        written = {line for line in statements((STATIC / file).read_text("utf-8")) if not line.startswith("import ")}
        lost = {line.removeprefix("export ") for line in written} - statements(bundle.script(file))
        assert not lost, path


@node
def test_the_bundle_computes_what_the_modules_do(tmp_path: Path) -> None:
    asked = "[0, 1, 1e-19, 2 ** -16, 0.3].map(decodeEncoded)"
    body = "const decodeEncoded = (w) => $map_colour.decode($map_colour.encode(w));\n"
    body += f"console.log(JSON.stringify({asked}));"
    joined = run(bundle.script("map/colour.js") + body, tmp_path)
    shutil.copytree(STATIC, tmp_path, dirs_exist_ok=True)
    (tmp_path / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    apart = run(f'import * as $map_colour from "./map/colour.js";\n{body}', tmp_path)
    assert joined == apart
    assert joined == pytest.approx([0, 1, 1e-19, 2**-16, 0.3], rel=3.4e-4)


@node
def test_the_widget_is_a_module_with_a_render_function(tmp_path: Path) -> None:
    body = (
        'import widget from "./widget.mjs";\nconsole.log(JSON.stringify([typeof widget.render, Object.keys(widget)]));'
    )
    (tmp_path / "widget.mjs").write_text(bundle.widget_module(), encoding="utf-8")
    assert run(body, tmp_path) == ["function", ["render"]]


@node
@pytest.mark.parametrize(("language", "said"), [("zh-CN", "头"), ("en-US", "Heads"), ("fr-FR", "Heads")])
def test_a_script_has_its_translations(language: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    page = bundle.offline_page()
    script = re.search(r"<script>\(\(\) => \{(.*?)\$offline.startOffline\(\);", page, re.S)[1]
    widget = bundle.widget_module().partition("export default")[0]
    for joined in (script, widget):
        navigator = f'Object.defineProperty(globalThis, "navigator", {{ value: {{ language: "{language}" }} }});\n'
        assert run(f'{navigator}{joined}\nconsole.log(JSON.stringify($words_words.t("Heads")));', tmp_path) == said


@node
def test_levels_that_fit_in_an_offline_page(tmp_path: Path) -> None:
    entry = {"m": 100_000, "n": 100_000, "first_query": 0, "first_key": 0, "causal": True, "levels": 10}
    assert levels_that_fit(entry, 24 << 20) == [9, 8, 7, 6, 5]  # 1 + 3 + 10 + 28 + 91 tiles; the next level has 325
    body = (
        f"const entry = {json.dumps(entry)};\n"
        "const tiles = (level) => $data_pack.listTiles(entry, level).map((t) => [t.y, t.x]);\n"
        "console.log(JSON.stringify([tiles(8), [9, 8, 7, 6, 5].map((level) => tiles(level).length)]));"
    )
    coarse, counts = run(bundle.script("data/pack.js") + body, tmp_path)
    assert coarse == [[0, 0], [1, 0], [1, 1]]  # nothing is allowed in tile (0, 1)
    assert counts == [1, 3, 10, 28, 91]  # what the page takes for masked is what the file leaves out


def test_the_policy_names_the_very_script_and_style() -> None:
    page = bundle.offline_page()
    script = re.search(r"<script>(.*?)</script>", page, re.S)[1]
    style = re.search(r"<style>(.*?)</style>", page, re.S)[1]
    for text in (script, style):
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in page
    assert not re.search(r"\son\w+=|javascript:|src=|@import|url\(", page)
    assert page.index(bundle.DATA) < page.index(script)


def test_files_that_break_the_rules_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "default.js": "export default 3;",
        "star.js": 'import * as all from "./a.js";',
        "a.js": 'import { b } from "./b.js";\nexport const a = b;',
        "b.js": 'import { a } from "./a.js";\nexport const b = a;',
        "late.js": "await start();",
        "outside.js": 'import { a } from "a.js";',
    }
    monkeypatch.setattr(bundle, "_text_of_file", files.__getitem__)
    for name, found in [
        ("default.js", "'export default 3;' in default.js"),
        ("star.js", "star.js"),
        ("late.js", "'await start();' in late.js"),
        ("outside.js", "in outside.js"),
        ("a.js", "a.js → b.js → a.js"),
    ]:
        with pytest.raises(bundle.BundleError, match=re.escape(found)):
            bundle.script(name)


def test_a_path_is_that_from_the_folder_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "start.js": 'import { a } from "./one/a.js";\na();',
        "one/a.js": 'import { b } from "../two/b.js";\nexport const a = b;',
        "two/b.js": 'import { c } from "./c.js";\nexport const b = c;',
        "two/c.js": "export const c = 1;",
    }
    monkeypatch.setattr(bundle, "_text_of_file", files.__getitem__)
    joined = bundle.script("start.js")
    assert re.findall(r"^const (\S+) =", joined, re.M)[::2] == ["$two_c", "$two_b", "$one_a", "$start"]
    assert "const { c } = $two_c;" in joined
    assert "const { b } = $two_b;" in joined


def test_names_are_given_others_on_import(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "one.js": "export const value = 1;\nexport function f() {}\nexport async function g() {}\nexport class C {}",
        "two.js": 'import {\n  value as other,\n  C,\n} from "./one.js";\nexport const sum = other;',
    }
    monkeypatch.setattr(bundle, "_text_of_file", files.__getitem__)
    assert bundle.script("two.js") == (
        "const $one = (() => {\nconst value = 1;\nfunction f() {}\nasync function g() {}\nclass C {}\n"
        "return { value, f, g, C };\n})();\n\n"
        "const $two = (() => {\nconst { value: other, C } = $one;\nconst sum = other;\nreturn { sum };\n})();\n"
    )


def test_a_missing_file_is_named() -> None:
    with pytest.raises(bundle.BundleError, match=r"found: none\.js"):
        bundle.script("none.js")
