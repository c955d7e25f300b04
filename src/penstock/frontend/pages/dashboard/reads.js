// Reads by a timer. Ends when the server has no such route, or when the component or the API key is replaced.
import { useEffect } from "../vendor/preact.js";

export function useReads(period, keyed, read) {
  useEffect(() => {
    let ended = false;
    let timer;
    const next = async () => {
      const missing = await read().then(() => false, (error) => error.status === 404);
      if (!missing && !ended) timer = setTimeout(next, period);
    };
    next();
    return () => {
      ended = true;
      clearTimeout(timer);
    };
  }, [keyed]);
}
