// Orders: a button, what would happen, a confirmation with the operator's key, and what the verb says.

import { el } from "./text.js";

const KEY = "millrace-operator-key";

/** A button that opens the confirmation of an order. `order` is `Orders.open`. */
export function offer(order, asked) {
  return el("button", { type: "button", class: "order", "data-verb": asked.verb, click: () => order(asked) }, asked.label);
}

export class Orders {
  constructor(dialog) {
    this.dialog = dialog;
    dialog.addEventListener("close", () => this.dialog.replaceChildren());
  }

  /** Asks whether an order is meant. The key stays in this tab. */
  open = (asked) => {
    const key = el("input", { type: "password", name: "key", autocomplete: "off", required: true, value: sessionStorage.getItem(KEY) ?? "" });
    const output = el("pre", { class: "said", hidden: true, "aria-live": "polite" });
    const go = el("button", { type: "submit", class: "order" }, asked.label);
    const form = el(
      "form",
      { method: "dialog", submit: (event) => { event.preventDefault(); this.#give(asked, key.value, { output, go }); } },
      el("h2", {}, `${asked.label}: ${asked.what}`),
      asked.effect().map((line) => el("p", {}, line)),
      el("p", { class: "quiet" }, "Forecast from what the page knows now. It is the same order as ", el("code", {}, command(asked)), "."),
      el("label", {}, "Operator's key ", key),
      el("p", { class: "quiet" }, "The operator's password on the bus: ", el("code", {}, "operator_password"), " in run/cluster.json of the cluster's folder."),
      output,
      el("div", { class: "choices" }, el("button", { type: "button", click: () => this.dialog.close() }, "Close"), go),
    );
    this.dialog.replaceChildren(form);
    this.dialog.showModal();
    (key.value ? go : key).focus();
  };

  async #give(asked, key, { output, go }) {
    sessionStorage.setItem(KEY, key);
    go.disabled = true;
    output.hidden = false;
    output.textContent = "";
    const { verb, what, to = "" } = asked;
    try {
      const answer = await fetch("/order", { method: "POST", headers: { authorization: `Bearer ${key}` }, body: JSON.stringify({ verb, what, to }) });
      if (!answer.ok) output.textContent = (await answer.json()).error;
      else await this.#listen(answer.body.getReader(), output);
    } catch (error) {
      output.textContent += `\n${error.message}`;
    }
    go.disabled = false;
  }

  async #listen(reader, output) {
    const decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const { line, code } = JSON.parse(part.slice("data: ".length));
        output.textContent += line === undefined ? (code ? `it failed (${code})` : "done") : `${line}\n`;
        output.dataset.code = code ?? "";
      }
    }
  }
}

function command({ verb, what, to }) {
  if (verb === "back") return `millrace drain ${what} --back`;
  if (verb === "migrate") return `millrace migrate ${what}${to ? ` --to ${to}` : ""}`;
  return `millrace ${verb} ${what}${to ? ` ${to}` : ""}`;
}
