"""The page's style sheet. Hues are those of Okabe and Ito, told apart with any colour vision, darker or lighter by ground."""

LIGHT = "--ground:#ffffff;--ink:#1b1d21;--quiet:#565b64;--rule:#d9dce1;--panel:#f5f6f8;--c0:#0072b2;--c1:#c04e00;--c2:#00805f;--c3:#a3477e;--c4:#9a6a00;--c5:#2a7ca8;--c6:#5c5c5c;--d1:#e0eefa;--d2:#bedcf3;--d3:#98c6ea;--d4:#6dabdd;--d5:#4a93cf;"
DARK = "--ground:#14161a;--ink:#e7e9ec;--quiet:#a3a9b3;--rule:#343941;--panel:#1d2026;--c0:#56b4e9;--c1:#f08c4a;--c2:#3cc79c;--c3:#e09cc4;--c4:#f0c040;--c5:#9fd0ee;--c6:#b5b5b5;--d1:#15293b;--d2:#18405f;--d3:#1d5684;--d4:#2468a0;--d5:#2d7bbb;"

SHEET = """
*{box-sizing:border-box}
body{margin:0 auto;padding:1.5rem 1.25rem 3rem;max-width:68rem;background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif;overflow-wrap:break-word}
h1{font-size:1.65rem;line-height:1.25;margin:.5rem 0 1rem}
h2{font-size:1.25rem;margin:2.2rem 0 .7rem;padding-top:.8rem;border-top:1px solid var(--rule)}
p{margin:.5rem 0;max-width:46rem}
.quiet,footer{color:var(--quiet);font-size:.9rem}
.note{border-left:3px solid var(--c1);padding-left:.7rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,14rem),1fr));gap:.8rem;margin:1rem 0}
.card{background:var(--panel);border-radius:8px;padding:.8rem 1rem;display:flex;flex-direction:column}
.card span,.card small{color:var(--quiet);font-size:.85rem}
.card strong{font-size:1.9rem;line-height:1.3}
.wide{overflow-x:auto;margin:.6rem 0}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .65rem;border-bottom:1px solid var(--rule);text-align:right;vertical-align:bottom;white-space:nowrap}
td{max-width:30rem}
thead th{color:var(--quiet);font-weight:600;white-space:normal}
th:first-child{text-align:left;padding-left:0}
.setting td{text-align:left;white-space:normal;overflow-wrap:anywhere}
.pictures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,27rem),1fr));gap:1rem;align-items:start}
figure{margin:.6rem 0;padding:.9rem 1rem;background:var(--panel);border-radius:8px;min-width:0}
.pictures figure{margin:0;max-width:34rem}
figcaption{font-weight:600;margin-bottom:.4rem}
figure svg{display:block;width:100%;height:auto}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.15rem .9rem;margin:.3rem 0 .6rem;padding:0;font-size:.85rem}
.legend li{max-width:100%;overflow-wrap:anywhere}
.legend .swatch{display:inline-block;width:18px;height:16px;vertical-align:-3px;margin-right:.3rem}
svg text{fill:var(--quiet);font-size:12.5px;font-family:inherit}
svg text.group{fill:var(--ink);font-weight:600;paint-order:stroke;stroke:var(--panel);stroke-width:5px}
svg text.value{fill:var(--ink);font-variant-numeric:tabular-nums}
.grid{stroke:var(--rule);stroke-width:1}
.one{stroke:var(--ink);stroke-width:1.3;stroke-dasharray:2 3}
.block{stroke:var(--panel);stroke-width:1}
.line{fill:none;stroke-width:2}
.dashed{stroke-dasharray:5 4;stroke-width:1.5}
.line.plain{stroke:var(--quiet)}
.text{white-space:pre-wrap;max-width:none;line-height:1.75;font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.88rem}
.text span,.legend span{padding:.12em 0;border-radius:3px;-webkit-print-color-adjust:exact;print-color-adjust:exact}
.legend span{padding:.12em .4em}
details{margin:.6rem 0}
summary{cursor:pointer;color:var(--quiet)}
dt{font-weight:600;margin-top:.5rem}
dd{margin:0 0 0 1rem;max-width:46rem}
@media (max-width:30rem){body{padding:1rem .8rem 2rem}h1{font-size:1.35rem}figure{padding:.7rem}svg text{font-size:15px}}
@media print{body{max-width:none;font-size:11pt}figure,.card,tr{break-inside:avoid}.wide{overflow:visible}table{font-size:8.5pt}details::details-content{content-visibility:visible;height:auto}}
"""


def coloured(count: int, depths: int) -> str:
    """The classes c0, c1, ... of marks and by1, by2, ... of text."""
    marks = (f".dot.c{at},.block.c{at}{{fill:var(--c{at})}}.line.c{at}{{stroke:var(--c{at})}}" for at in range(count))
    return "".join([*marks, *(f".by{at}{{background:var(--d{at})}}" for at in range(1, depths + 1))])


STYLE = (
    f":root{{color-scheme:light dark;{LIGHT}}}"
    f"@media (prefers-color-scheme:dark){{:root{{{DARK}}}}}"
    f"@media print{{:root{{{LIGHT}}}}}" + SHEET + coloured(7, 5)
)
