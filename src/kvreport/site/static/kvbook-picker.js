/* Questions above the front page's symptoms: an answer hides what does not fit it, and opens what fits best. All that is said
   stands in the symptoms themselves, with classes that name the answers they belong to; without this they are a list. */
(() => {
  const QUESTIONS = [
    ["changed", "What changed?", {
      logits: "logits or hidden states", text: "the generated text", loss: "loss or perplexity", speed: "the speed",
      equal: "nothing may change",
    }],
    ["dtype", "In which dtype?", { 32: "fp32 or fp64", 16: "bf16 or fp16 only" }],
    ["loop", "Who feeds the tokens?", { generate: "generate", own: "my own loop" }],
    ["ids", "Do the ids continue the cached ones?", { yes: "yes, I compared them", no: "no, or I did not look" }],
    ["past", "Longer than the block or window?", { no: "no", yes: "yes" }],
  ];

  /* What a symptom says of a question: null if nothing, else whether the answer is among its own. */
  function fits(symptom, question, answer) {
    const own = [...symptom.classList].filter((name) => name.startsWith(`${question}-`));
    return own.length && answer ? own.includes(`${question}-${answer}`) : null;
  }

  function enable(symptoms) {
    const form = document.createElement("form");
    form.className = "kvbook-picker";
    form.setAttribute("aria-label", "Find your symptom");
    for (const [name, words, answers] of QUESTIONS) {
      const label = document.createElement("label");
      const select = document.createElement("select");
      select.name = name;
      select.append(new Option("any", ""), ...Object.entries(answers).map(([value, text]) => new Option(text, value)));
      label.append(words, select);
      form.append(label);
    }
    const count = document.createElement("output");
    const reset = document.createElement("button");
    reset.type = "reset";
    reset.textContent = "Start again";
    const last = document.createElement("div");
    last.append(reset, count);
    form.append(last);

    function apply() {
      const asked = QUESTIONS.map(([name]) => [name, form.elements[name].value]);
      let best = null;
      let most = 0;
      let shown = 0;
      for (const symptom of symptoms) {
        const said = asked.map(([name, answer]) => fits(symptom, name, answer));
        symptom.hidden = said.includes(false);
        symptom.open = false;
        const agreed = said.filter((one) => one === true).length;
        if (!symptom.hidden) {
          shown += 1;
          if (agreed > most) [best, most] = [symptom, agreed];
        }
      }
      if (best) best.open = true;
      count.value = `${shown} of ${symptoms.length} fit`;
    }

    form.addEventListener("input", apply);
    form.addEventListener("submit", (event) => event.preventDefault());
    // The fields are emptied only after this event.
    form.addEventListener("reset", () => setTimeout(apply));
    symptoms[0].before(form);
    // A browser that goes back may remember answers.
    apply();
  }

  document.addEventListener("DOMContentLoaded", () => {
    const symptoms = [...document.querySelectorAll("details.symptom")];
    if (symptoms.length) enable(symptoms);
  });
})();
