// The site's search in pages read from a disk, where browsers start no worker: the worker's script runs in a hidden
// frame instead. The generator's plugin "offline" asks for a script of this name; its own comes from another host.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #ready;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const inside = this.#frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", {data}));
      inside.importScripts = (...urls) => Promise.all(urls.map((each) => this.#load(each)));
      this.#ready = this.#load(url);
    }

    #load(url) {
      return new Promise((resolve, reject) => {
        const script = this.#frame.contentDocument.createElement("script");
        Object.assign(script, {src: url, onload: resolve, onerror: () => reject(new Error(`not found: ${url}`))});
        this.#frame.contentDocument.body.append(script);
      });
    }

    postMessage(data) {
      this.#ready.then(() => this.#frame.contentWindow.dispatchEvent(new MessageEvent("message", {data})));
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
