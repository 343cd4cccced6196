// Formulas as answers write them (a subset of TeX), read into records of MathML: { tag, props, kids }.
// A formula with anything that is not known here is shown as it is written, so none is ever wrong
// in silence. Names of tags come from the tables below, and text only ever becomes text.

const LONGEST = 4000, DEEPEST = 40;

const LETTERS = table(`alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ
  iota ι kappa κ lambda λ mu μ nu ν xi ξ pi π rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ
  omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω
  infty ∞ partial ∂ nabla ∇ ell ℓ hbar ℏ Re ℜ Im ℑ aleph ℵ emptyset ∅ varnothing ∅ forall ∀ exists ∃ neg ¬ top ⊤ bot ⊥
  ldots … cdots ⋯ dots … vdots ⋮ ddots ⋱ degree ° angle ∠ triangle △ prime ′ checkmark ✓`);
const SIGNS = table(`times × div ÷ cdot ⋅ pm ± mp ∓ ast ∗ star ⋆ circ ∘ bullet ∙ oplus ⊕ otimes ⊗ odot ⊙ wedge ∧ land ∧ vee ∨ lor ∨
  cap ∩ cup ∪ setminus ∖ le ≤ leq ≤ ge ≥ geq ≥ ne ≠ neq ≠ lt < gt > ll ≪ gg ≫ approx ≈ sim ∼ simeq ≃ cong ≅ equiv ≡ propto ∝
  in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ supset ⊃ supseteq ⊇ perp ⊥ parallel ∥ mid ∣ to → rightarrow → leftarrow ←
  leftrightarrow ↔ Rightarrow ⇒ implies ⟹ Leftarrow ⇐ Leftrightarrow ⇔ iff ⟺ mapsto ↦ uparrow ↑ downarrow ↓ colon :
  langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ lvert | rvert | vert | Vert ‖ lVert ‖ rVert ‖ lbrace { rbrace } backslash \\`);
const LARGE = table("sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂");
const INTEGRALS = table("int ∫ iint ∬ iiint ∭ oint ∮");
const ACCENTS = table("hat ^ widehat ^ bar ¯ overline ¯ vec → dot ˙ ddot ¨ tilde ~ widetilde ~");
const SPACES = { ",": ".17em", ":": ".22em", ";": ".28em", "!": "0em", " ": ".28em", quad: "1em", qquad: "2em" };
const NAMES = new Set("sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log ln lg exp det dim ker deg gcd arg Pr".split(" "));
const LIMITS = new Set("lim max min sup inf limsup liminf argmax argmin".split(" "));
const FACES = { mathbb: "double-struck", mathcal: "script", mathfrak: "fraktur", mathbf: "bold", boldsymbol: "bold", mathrm: "normal", mathsf: "normal", mathit: "italic" };
const WORDS = new Set(["text", "textrm", "textbf", "textit", "mbox", "mathrm", "operatorname"]);
const FENCES = { matrix: "", pmatrix: "()", bmatrix: "[]", vmatrix: "||", Vmatrix: "‖‖", cases: "{", aligned: "", align: "", "align*": "", array: "" };

class Unknown extends Error {}

function table(text) {
  const words = text.trim().split(/\s+/);
  return new Map(words.flatMap((word, at) => (at % 2 ? [] : [[word, words[at + 1]]])));
}

const node = (tag, props, ...kids) => ({ tag, props, kids });
const row = (kids) => (kids.length === 1 ? kids[0] : node("mrow", {}, ...kids));
const sign = (text, props = {}) => node("mo", props, text);

/** The record of a formula. `shown`: on a line of its own. */
export function formula(source, shown = false) {
  const text = source.trim();
  try {
    if (text.length > LONGEST) throw new Unknown("too long");
    const reader = new Reader(text, shown);
    const kids = reader.until(() => false);
    if (reader.next !== undefined) throw new Unknown(reader.next);
    return node("math", { display: shown ? "block" : null, alttext: text }, row(kids));
  } catch (error) {
    if (!(error instanceof Unknown)) throw error;
    return node(shown ? "pre" : "code", shown ? { language: "" } : {}, text);
  }
}

class Reader {
  constructor(text, shown) {
    this.tokens = text.match(/\\[a-zA-Z]+\*?|\\[^]|\d+(?:[.,]\d+)*|\s+|[^]/gu) ?? [];
    this.at = 0;
    this.depth = 0;
    this.shown = shown;
  }

  get next() {
    return this.tokens[this.at];
  }

  take() {
    const token = this.tokens[this.at++];
    if (token === undefined) throw new Unknown("the end");
    return token;
  }

  skip() {
    while (/^\s/.test(this.next ?? "")) this.at += 1;
  }

  /** All up to a token that is not taken. */
  until(isEnd) {
    if (++this.depth > DEEPEST) throw new Unknown("too deep");
    const kids = [];
    for (this.skip(); this.next !== undefined && !isEnd(this.next); this.skip()) {
      if (this.next === "}" || this.next === "&" || this.next === "\\\\" || this.next === "\\right" || this.next === "\\end") throw new Unknown(this.next);
      kids.push(this.scripted(this.atom()));
    }
    this.depth -= 1;
    return kids;
  }

  /** What stands at it above and below. */
  scripted({ kid, limits }) {
    let below, above;
    for (this.skip(); "^_'".includes(this.next ?? " ");  this.skip()) {
      const mark = this.take();
      if (mark === "_") below = this.only(below);
      else if (mark === "^") above = this.only(above);
      else above = node("mrow", {}, ...(above ? [above] : []), sign("′"));
    }
    if (!below && !above) return kid;
    const over = limits && this.shown;
    const tag = below && above ? (over ? "munderover" : "msubsup") : below ? (over ? "munder" : "msub") : over ? "mover" : "msup";
    return node(tag, {}, kid, ...[below, above].filter(Boolean));
  }

  only(before) {
    if (before) throw new Unknown("two scripts");
    return this.argument();
  }

  /** One thing: a group in braces, a command, or a character. */
  argument() {
    this.skip();
    if (this.next === "{") return this.group();
    if ("^_'}&".includes(this.next ?? "}")) throw new Unknown(this.next);
    if (/^\d{2}/.test(this.next)) { // x^12 is x to the 1, and a 2
      const token = this.take();
      this.tokens.splice(this.at, 0, token.slice(1));
      return node("mn", {}, token[0]);
    }
    if (++this.depth > DEEPEST) throw new Unknown("too deep");
    const { kid } = this.atom();
    this.depth -= 1;
    return kid;
  }

  group() {
    this.expect("{");
    const kids = this.until((token) => token === "}");
    this.expect("}");
    return kids.length === 1 ? kids[0] : node("mrow", {}, ...kids);
  }

  expect(token) {
    if (this.take() !== token) throw new Unknown(token);
  }

  /** The characters of a group, as they are. */
  words() {
    this.skip();
    this.expect("{");
    let text = "";
    while (this.next !== "}") {
      const token = this.take();
      if (token === "{" || (token[0] === "\\" && !/^\\[ ,%$&#_]$/.test(token))) throw new Unknown(token);
      text += token[0] === "\\" ? token[1] : token;
    }
    this.take();
    return text.replace(/^ | $/g, "\u00a0");
  }

  atom() {
    const token = this.next;
    if (token === "{") return { kid: this.group() };
    this.take();
    if (token[0] === "\\" && token.length > 1) return this.command(token.slice(1));
    if (/^\d/.test(token)) return { kid: node("mn", {}, token) };
    if (/^\p{L}/u.test(token)) return { kid: node("mi", {}, token) };
    if ("\\^_'#%$~".includes(token)) throw new Unknown(token);
    return { kid: sign(token === "-" ? "−" : token === "*" ? "∗" : token, "()[]|".includes(token) ? { stretchy: "false" } : {}) };
  }

  command(name) {
    if (LETTERS.has(name)) return { kid: node("mi", {}, LETTERS.get(name)) };
    if (SIGNS.has(name)) return { kid: sign(SIGNS.get(name)) };
    if (LARGE.has(name)) return { kid: sign(LARGE.get(name), { largeop: "true" }), limits: true };
    if (INTEGRALS.has(name)) return { kid: sign(INTEGRALS.get(name), { largeop: "true" }) };
    if (NAMES.has(name)) return { kid: node("mi", {}, name) };
    if (LIMITS.has(name)) return { kid: node("mo", {}, name), limits: true };
    if (Object.hasOwn(SPACES, name)) return { kid: node("mspace", { width: SPACES[name] }) };
    if ("{}%$#&_|".includes(name)) return { kid: sign(name === "|" ? "‖" : name, { stretchy: "false" }) };
    if (ACCENTS.has(name)) return { kid: node("mover", { accent: "true" }, this.argument(), sign(ACCENTS.get(name))) };
    if (WORDS.has(name)) return { kid: node("mtext", {}, this.words()) };
    if (Object.hasOwn(FACES, name)) return { kid: faced(this.words(), FACES[name]) };
    return { kid: this.built(name) };
  }

  /** What is built of others. */
  built(name) {
    if (["frac", "dfrac", "tfrac"].includes(name)) return node("mfrac", {}, this.argument(), this.argument());
    if (name === "binom") {
      const parts = node("mfrac", { linethickness: "0" }, this.argument(), this.argument());
      return node("mrow", {}, sign("("), parts, sign(")"));
    }
    if (name === "sqrt") return this.root();
    if (name === "left") return this.fence();
    if (name === "begin") return this.environment();
    if (["displaystyle", "limits", "nolimits", "big", "Big", "bigl", "bigr", "Bigl", "Bigr", "middle"].includes(name)) return node("mrow", {});
    if (name === "boxed") return node("mrow", { class: "boxed" }, this.argument());
    if (name === "underbrace" || name === "overbrace") {
      return node(name === "overbrace" ? "mover" : "munder", {}, this.argument(), sign(name === "overbrace" ? "⏞" : "⏟"));
    }
    throw new Unknown(name);
  }

  root() {
    this.skip();
    if (this.next !== "[") return node("msqrt", {}, this.argument());
    this.take();
    const index = this.until((token) => token === "]");
    this.expect("]");
    return node("mroot", {}, this.argument(), row(index));
  }

  fence() {
    const edge = () => {
      this.skip();
      const token = this.take(), name = token.slice(1);
      if (token === ".") return [];
      if ("()[]|/<>".includes(token)) return [sign(token, { fence: "true", stretchy: "true" })];
      if (token[0] === "\\" && (SIGNS.has(name) || "{}|".includes(name))) return [sign(SIGNS.get(name) ?? (name === "|" ? "‖" : name), { fence: "true", stretchy: "true" })];
      throw new Unknown(token);
    };
    const before = edge();
    const kids = this.until((token) => token === "\\right");
    this.expect("\\right");
    return node("mrow", {}, ...before, ...kids, ...edge());
  }

  environment() {
    const name = this.words();
    if (!Object.hasOwn(FENCES, name)) throw new Unknown(name);
    if (name === "array") this.words(); // how its columns stand
    const rows = [[]];
    for (;;) {
      rows.at(-1).push(row(this.until((token) => token === "&" || token === "\\\\" || token === "\\end")));
      const token = this.take();
      if (token === "\\\\") rows.push([]);
      if (token === "\\end") break;
    }
    if (this.words() !== name) throw new Unknown(name);
    const lines = rows.map((cells) => node("mtr", {}, ...cells.map((cell) => node("mtd", {}, cell))));
    const made = node("mtable", { class: /align|cases/.test(name) ? "lines" : null }, ...lines);
    const [before, after] = FENCES[name];
    return node("mrow", {}, ...(before ? [sign(before, { stretchy: "true" })] : []), made, ...(after ? [sign(after, { stretchy: "true" })] : []));
  }
}

const BOARD = { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" };

/** Letters in another face: a browser's MathML knows only the upright one, the rest are characters. */
function faced(text, face) {
  if (face === "double-struck") return node("mi", {}, [...text].map((one) => BOARD[one] ?? one).join(""));
  return node("mi", { mathvariant: face === "normal" ? "normal" : null, class: face }, text);
}
