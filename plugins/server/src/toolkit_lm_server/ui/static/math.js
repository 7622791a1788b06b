// Formulas: a part of LaTeX as MathML. A formula with anything else stays text.

import { element } from "./dom.js";

const LONG = 2000;
const DEEPEST = 24;
const SPACE = "http://www.w3.org/1998/Math/MathML";

const pairs = (text) => text.trim().split(/\s+/).map((pair) => pair.split(":"));

const LETTERS = new Map(
  pairs(`
    alpha:α beta:β gamma:γ delta:δ epsilon:ϵ varepsilon:ε zeta:ζ eta:η theta:θ vartheta:ϑ iota:ι
    kappa:κ lambda:λ mu:μ nu:ν xi:ξ pi:π varpi:ϖ rho:ρ sigma:σ varsigma:ς tau:τ upsilon:υ phi:ϕ
    varphi:φ chi:χ psi:ψ omega:ω Gamma:Γ Delta:Δ Theta:Θ Lambda:Λ Xi:Ξ Pi:Π Sigma:Σ Upsilon:Υ
    Phi:Φ Psi:Ψ Omega:Ω infty:∞ partial:∂ nabla:∇ ell:ℓ hbar:ℏ emptyset:∅ varnothing:∅ Re:ℜ Im:ℑ
    aleph:ℵ top:⊤ bot:⊥ ldots:… cdots:⋯ vdots:⋮ ddots:⋱ dots:… angle:∠ degree:°`),
);
const SIGNS = new Map(
  pairs(`
    times:× cdot:· div:÷ pm:± mp:∓ ast:∗ star:⋆ circ:∘ bullet:∙ oplus:⊕ otimes:⊗ leq:≤ le:≤ geq:≥
    ge:≥ neq:≠ ne:≠ approx:≈ equiv:≡ sim:∼ simeq:≃ cong:≅ propto:∝ ll:≪ gg:≫ in:∈ notin:∉ ni:∋
    subset:⊂ subseteq:⊆ supset:⊃ supseteq:⊇ cup:∪ cap:∩ setminus:∖ forall:∀ exists:∃ neg:¬ lnot:¬
    land:∧ wedge:∧ lor:∨ vee:∨ to:→ rightarrow:→ leftarrow:← leftrightarrow:↔ Rightarrow:⇒
    Leftarrow:⇐ Leftrightarrow:⇔ iff:⟺ implies:⟹ mapsto:↦ uparrow:↑ downarrow:↓ mid:∣ parallel:∥
    perp:⊥ prime:′ langle:⟨ rangle:⟩ lfloor:⌊ rfloor:⌋ lceil:⌈ rceil:⌉ lbrace:{ rbrace:} vert:|
    Vert:‖ lvert:| rvert:| lVert:‖ rVert:‖`),
);
const LARGE = new Map(
  pairs("sum:∑ prod:∏ coprod:∐ int:∫ iint:∬ iiint:∭ oint:∮ bigcup:⋃ bigcap:⋂ bigoplus:⨁"),
);
const NAMES = new Set(
  ("arccos arcsin arctan arg cos cosh cot coth csc deg det dim exp gcd hom inf ker lg lim liminf "
    + "limsup ln log max min Pr sec sin sinh sup tan tanh").split(" "),
);
const BELOW = new Set(["lim", "max", "min", "sup", "inf", "limsup", "liminf", "det", "gcd"]);
const STYLES = new Map(
  pairs(`mathbf:bold boldsymbol:bold mathrm:normal operatorname:normal mathit:italic
    mathsf:sans-serif mathtt:monospace`),
);
const ACCENTS = new Map(
  pairs("hat:^ widehat:^ bar:¯ overline:¯ vec:→ tilde:~ widetilde:~ dot:˙ ddot:¨"),
);
const SPACES = new Map([
  [",", 0.17], [":", 0.22], [";", 0.28], ["!", 0], [" ", 0.25], ["quad", 1], ["qquad", 2],
]);
const TABLES = new Map([
  ["matrix", ["", ""]], ["pmatrix", ["(", ")"]], ["bmatrix", ["[", "]"]], ["vmatrix", ["|", "|"]],
  ["cases", ["{", ""]], ["aligned", ["", ""]], ["align", ["", ""]], ["align*", ["", ""]],
]);
const TOKEN = /\s+|\\(?:[A-Za-z]+|.)|[^]/gu;

/** A formula as MathML, or its text as code where it has more than this file knows. */
export function formula(text, display) {
  try {
    if (text.length > LONG) throw new Error("long");
    const parser = new Parser(text);
    const row = make("mrow", ...parser.row(() => parser.ended()));
    const math = make("math", row);
    if (display) math.setAttribute("display", "block");
    math.setAttribute("alttext", text.trim());
    return math;
  } catch {
    return element("code", { class: "formula" }, text.trim());
  }
}

function make(tag, ...children) {
  const made = document.createElementNS(SPACE, tag);
  made.append(...children);
  return made;
}

function sign(text, stretches = false) {
  const made = make("mo", text);
  made.setAttribute("stretchy", stretches);
  return made;
}

/** A capital letter, double-struck: of 𝔸 to 𝕐, seven are elsewhere in Unicode. */
function doubled(letter) {
  if (!/[A-Z]/.test(letter)) throw new Error(letter);
  const elsewhere = { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" };
  return elsewhere[letter] ?? String.fromCodePoint(0x1d538 + letter.charCodeAt(0) - 65);
}

/** A parser of one formula. Its methods raise an error at what they do not know. */
class Parser {
  constructor(text) {
    this.tokens = text.match(TOKEN) ?? [];
    this.at = 0;
    this.depth = 0;
  }

  ended() {
    return this.at >= this.tokens.length;
  }

  /** The next token that is no blank, which stays where it is. */
  peek() {
    while (/^\s/.test(this.tokens[this.at] ?? "")) this.at++;
    return this.tokens[this.at] ?? "";
  }

  next() {
    const token = this.peek();
    if (!token) throw new Error("ended");
    this.at++;
    return token;
  }

  expect(token) {
    if (this.next() !== token) throw new Error(token);
  }

  /** Elements until `done()`. */
  row(done) {
    if (++this.depth > DEEPEST) throw new Error("deep");
    const found = [];
    for (this.peek(); !done(); this.peek()) found.push(this.scripted());
    this.depth--;
    return found;
  }

  /** The text within braces, as it is. */
  raw() {
    this.expect("{");
    let text = "";
    while (this.tokens[this.at] !== "}") {
      if (this.ended()) throw new Error("ended");
      text += this.tokens[this.at++];
    }
    this.at++;
    return text;
  }

  /** One argument: a group in braces, or one element. */
  argument() {
    if (this.peek() !== "{") return this.atom();
    this.next();
    const inner = this.row(() => this.peek() === "}");
    this.expect("}");
    return make("mrow", ...inner);
  }

  /** An element with what stands above and below it. */
  scripted() {
    const token = this.peek();
    const base = "^_".includes(token) ? make("mrow") : this.atom();
    const scripts = {};
    for (let mark = this.peek(); mark === "^" || mark === "_" || mark === "'"; mark = this.peek()) {
      this.next();
      const kind = mark === "_" ? "_" : "^";
      if (scripts[kind]) throw new Error("twice");
      scripts[kind] = mark === "'" ? sign("′") : this.argument();
    }
    const { "^": above, _: below } = scripts;
    const name = token.slice(1);
    const limits = BELOW.has(name) || (LARGE.has(name) && !name.endsWith("int"));
    if (above && below) return make(limits ? "munderover" : "msubsup", base, below, above);
    if (above) return make(limits ? "mover" : "msup", base, above);
    if (below) return make(limits ? "munder" : "msub", base, below);
    return base;
  }

  atom() {
    const token = this.next();
    if (token === "{") {
      this.at--;
      return this.argument();
    }
    if (/^\d$/.test(token)) return this.number(token);
    if (/^\p{L}$/u.test(token)) return make("mi", token);
    if (token[0] === "\\" && token.length > 1) return this.command(token.slice(1));
    if ("^_}&#%$~".includes(token)) throw new Error(token);
    return sign(token);
  }

  number(digits) {
    while (/^[\d.]$/.test(this.tokens[this.at] ?? "")) digits += this.tokens[this.at++];
    return make("mn", digits);
  }

  command(name) {
    if (LETTERS.has(name)) return make("mi", LETTERS.get(name));
    if (SIGNS.has(name)) return sign(SIGNS.get(name));
    if (LARGE.has(name)) return make("mo", LARGE.get(name));
    if (NAMES.has(name)) return make("mi", name);
    if (SPACES.has(name)) return this.space(SPACES.get(name));
    if ("{}%$#&_|".includes(name)) return sign(name === "|" ? "‖" : name);
    if (STYLES.has(name)) return this.styled(STYLES.get(name));
    if (ACCENTS.has(name)) return this.accent(ACCENTS.get(name));
    const known = { frac: "fraction", dfrac: "fraction", tfrac: "fraction", binom: "binomial" };
    if (Object.hasOwn(known, name)) return this[known[name]]();
    if (name === "mathbb") return make("mi", this.raw().replace(/./gu, doubled));
    if (name === "sqrt") return this.root();
    if (name === "text" || name === "textbf") return make("mtext", this.raw());
    if (name === "left") return this.fenced();
    if (name === "begin") return this.table();
    throw new Error(name);
  }

  space(width) {
    const made = make("mspace");
    made.setAttribute("width", `${width}em`);
    return made;
  }

  styled(variant) {
    const made = this.argument();
    made.setAttribute("class", `math-${variant}`);
    return made;
  }

  accent(mark) {
    const made = make("mover", this.argument(), sign(mark, true));
    made.setAttribute("accent", "true");
    return made;
  }

  fraction() {
    return make("mfrac", this.argument(), this.argument());
  }

  binomial() {
    const inner = this.fraction();
    inner.setAttribute("linethickness", "0");
    return make("mrow", sign("(", true), inner, sign(")", true));
  }

  root() {
    if (this.peek() !== "[") return make("msqrt", this.argument());
    this.next();
    const degree = this.row(() => this.peek() === "]");
    this.expect("]");
    return make("mroot", this.argument(), make("mrow", ...degree));
  }

  /** \left( … \right): delimiters as tall as what they enclose. */
  fenced() {
    const opening = this.delimiter();
    const inner = this.row(() => this.peek() === "\\right");
    this.expect("\\right");
    return make("mrow", opening, ...inner, this.delimiter());
  }

  delimiter() {
    const token = this.next();
    if (token === ".") return make("mrow");
    if ("()[]|/".includes(token)) return sign(token, true);
    const name = token.slice(1);
    if (token === "\\{" || token === "\\}") return sign(name, true);
    if (SIGNS.has(name)) return sign(SIGNS.get(name), true);
    throw new Error(token);
  }

  table() {
    const name = this.raw();
    if (!TABLES.has(name)) throw new Error(name);
    const made = make("mtable");
    const isEnd = () => this.peek() === "\\end";
    while (!isEnd()) {
      const row = make("mtr");
      for (let more = true; more; ) {
        const stop = () => ["&", "\\\\"].includes(this.peek()) || isEnd();
        row.append(make("mtd", ...this.row(stop)));
        more = this.peek() === "&";
        if (more) this.next();
      }
      made.append(row);
      if (!isEnd()) this.expect("\\\\");
    }
    this.next();
    if (this.raw() !== name) throw new Error(name);
    const [opening, closing] = TABLES.get(name);
    const fences = [opening, closing].map((text) => (text ? sign(text, true) : make("mrow")));
    return make("mrow", fences[0], made, fences[1]);
  }
}
