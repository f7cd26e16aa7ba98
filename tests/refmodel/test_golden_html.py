import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from refmodel.golden import compare
from refmodel.golden.picture import error_picture, levels


def pair():
    rng = np.random.default_rng(0)
    names = [f"layers.{L}.{stage}" for L in range(4) for stage in ("attn_core.out", "a_name_of_a_stage.<b>&")]
    r = {name: rng.standard_normal((30, 200)).astype(np.float32) for name in names}
    a = {name: x.copy() for name, x in r.items()}
    a[names[2]][3:5, 100:120] *= 2
    a[names[3]][7] = np.nan
    a[names[5]] *= np.float32(1.0001)
    return r, a


def test_each_cell_of_a_picture_is_the_worst_error_in_it():
    r = np.zeros((96, 192), np.float32)
    a = r.copy()
    a[3, 7] = -2
    a[95, 191] = np.nan
    picture = error_picture(r, a, 4.0)
    expected = np.zeros((48, 96))
    expected[1, 3], expected[47, 95] = 0.5, np.inf
    np.testing.assert_array_equal(picture, expected)
    assert error_picture(np.zeros(3), np.float64([0, 1, 0]), 0.0).tolist() == [[0, 1, 0]]
    assert levels(np.array([0, 1e-9, 1e-6, 2e-6, 0.5, 1, 2, np.inf])).tolist() == [0, 1, 1, 2, 6, 6, 7, 7]


def test_the_page_is_well_formed_and_names_nothing_outside():
    report = compare(*pair(), pictures=5)
    page = report.to_html()
    body = page[page.index("<body>") : page.index("</body>") + 7]
    ElementTree.fromstring(body)
    assert "http" not in page
    assert not re.search(r"(?:src|href)=['\"](?!data:,)", page)
    assert body.count("<path") >= 3
    assert "layers.1.a_name_of_a_stage.&lt;b&gt;&amp;" in body
    assert report.headline.split(" diverges")[0] in body


def test_pictures_are_drawn_for_the_first_failing_tensors_only():
    assert [r.name for r in compare(*pair(), pictures=1).results if r.picture is not None] == ["layers.1.attn_core.out"]
    assert all(r.picture is None for r in compare(*pair()).results)


def test_equal_and_empty_tensors_make_a_page():
    zeros = {"x": np.zeros((3, 4)), "none": np.zeros((0, 4))}
    page = compare(zeros, zeros, pictures=3).to_html()
    assert "No tensor differs." in page


def browser():
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(browser() is None, reason="no chromium on the path")
@pytest.mark.parametrize("width", [1280, 800])
def test_a_browser_shows_the_page_without_errors_requests_or_sideways_scrolling(tmp_path, width):
    page = compare(*pair(), pictures=5).to_html()
    probe = (
        "<script>addEventListener('load', () => { document.title = 'wide ' + document.documentElement.scrollWidth"
        " + ' of ' + innerWidth + ' requests ' + performance.getEntriesByType('resource').length; })</script>"
    )
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", probe + "</body>"), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--window-size={width},1000"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000", "--dump-dom"]
    done = subprocess.run([browser(), *flags, path.as_uri()], capture_output=True, text=True, timeout=120, check=False)
    title = re.search(r"<title>wide (\d+) of (\d+) requests (\d+)</title>", done.stdout)
    assert title is not None, done.stderr[-2000:]
    wide, inner, requests = map(int, title.groups())
    assert wide <= inner
    assert requests == 0
    assert ":CONSOLE" not in done.stderr
