// Orders: a button, what would happen, a confirmation with the operator's key, and what the verb says. In a simulation
// an order is carried out at once, without a key.

import { events } from "./feed.js";
import { el } from "./text.js";

const KEY = "millrace-operator-key";

/** A button that opens the confirmation of an order. `order` is `Orders.open`. */
export function offer(order, asked) {
  return el("button", { type: "button", class: "order", "data-verb": asked.verb, click: () => order(asked) }, asked.label);
}

const give = (order, file, key) => fetch("/order", { method: "POST", headers: { authorization: `Bearer ${key}` }, body: JSON.stringify({ order, file }) });

/** Asks a simulation for something, a fault or another pace: it takes any key. */
export const ask = (order) => give(order, "", "simulation");

/** A button that does harm to a simulation. */
export const harm = (verb, what, label) =>
  el("button", { type: "button", class: "order harm", "data-verb": verb, click: () => ask(`${verb} ${what}`.trim()) }, label);

export class Orders {
  constructor(dialog) {
    this.dialog = dialog;
    dialog.addEventListener("close", () => this.dialog.replaceChildren());
  }

  /** Asks whether an order is meant. The key stays in this tab. */
  open = (asked) => {
    const parts = this.#parts(asked.label);
    this.#ask(parts, () => this.#give(asked, parts),
      el("h2", {}, `${asked.label}: ${asked.what}`),
      asked.effect().map((line) => el("p", {}, line)),
      el("p", { class: "quiet" }, "Forecast from what the page knows now. It is the same order as ", el("code", {}, `millrace ${command(asked)}`), "."));
  };

  /** Shows the running cluster's file, then what a change of it would do, then does it. */
  edit = () => {
    const parts = this.#parts("Show the file");
    const file = el("textarea", { "aria-label": "the cluster's file", rows: 14, spellcheck: "false", hidden: true });
    const steps = { show: "Show the file", check: "What would change", apply: "Apply" };
    let verb = "show";
    const next = (name) => (parts.go.textContent = steps[(verb = name)]);
    file.addEventListener("input", () => next("check"));
    const go = async () => {
      const code = await this.#give({ verb, text: file.value }, parts);
      if (code !== 0 || verb === "apply") return;
      if (verb === "show") {
        file.value = parts.output.textContent.replace(/done$/, "");
        parts.output.hidden = true;
        file.hidden = false;
      }
      next(verb === "show" ? "check" : "apply");
    };
    this.#ask(parts, go,
      el("h2", {}, "The cluster's file"),
      el("p", {}, "Change it, see what becomes of each process, then apply: no stream is cut."),
      el("p", { class: "quiet" }, "The same as ", el("code", {}, "millrace cluster show"), ", then ", el("code", {}, "millrace apply FILE"), "."), file);
  };

  #parts(label) {
    return {
      key: el("input", { type: "password", name: "key", autocomplete: "off", required: true, value: sessionStorage.getItem(KEY) ?? "" }),
      output: el("pre", { class: "said", hidden: true, "aria-live": "polite" }),
      go: el("button", { type: "submit", class: "order" }, label),
    };
  }

  #ask({ key, output, go }, given, ...above) {
    const submit = (event) => {
      event.preventDefault();
      given();
    };
    const form = el("form", { method: "dialog", submit }, above,
      el("label", {}, "Operator's key ", key),
      el("p", { class: "quiet" }, "The operator's password on the bus: ", el("code", {}, "operator_password"), " in run/cluster.json of the cluster's folder."),
      output,
      el("div", { class: "choices" }, el("button", { type: "button", click: () => this.dialog.close() }, "Close"), go));
    this.dialog.replaceChildren(form);
    this.dialog.showModal();
    (key.value ? go : key).focus();
  }

  /** Gives an order; returns its exit code, null where it was not carried out. */
  async #give(asked, { key, output, go }) {
    sessionStorage.setItem(KEY, key.value);
    go.disabled = true;
    output.hidden = false;
    output.textContent = "";
    output.dataset.code = "";
    let ended = null;
    try {
      const answer = await give(command(asked), asked.text ?? "", key.value);
      if (!answer.ok) output.textContent = (await answer.json()).error;
      else
        for await (const each of events(answer)) {
          const { line, code } = JSON.parse(each);
          if (line === undefined) ended = code;
          output.textContent += line === undefined ? (code ? `it failed (${code})` : "done") : `${line}\n`;
          output.dataset.code = code ?? "";
        }
    } catch (error) {
      output.textContent += `\n${error.message}`;
    }
    go.disabled = false;
    return ended;
  }
}

/** An order as it is typed after `millrace`. */
function command({ verb, what = "", to = "" }) {
  const fixed = { back: `drain ${what} --back`, role: `role ${what} ${to} --detach`, show: "cluster show", check: "apply - --dry-run", apply: "apply -" };
  if (verb === "migrate" && to) return `migrate ${what} --to ${to}`;
  return fixed[verb] ?? `${verb} ${what} ${to}`.trim();
}
