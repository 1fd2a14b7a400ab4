// Ctrl-C, and other signals, while a kernel runs.
//
// A signal only sets a flag in Python; Python's main thread runs the handler when it looks at it. A call from the main thread
// does so now and then, on that thread, with Python's lock. If a handler raises, as that of Ctrl-C does, all threads of the
// call stop at their next checkpoint, and the call returns INTERRUPTED with Python's exception set. If it returns, the call
// goes on. A call from another thread does not look: Python runs no handlers there.
#pragma once

namespace attlas {

// What a checkpoint throws in a call that was interrupted.
struct Interrupted {};

// To be called every few milliseconds in a task: throws where the call was interrupted, and on the thread that made the call
// looks at signals from time to time. Handlers are any code, so no tile register of AMX may be in use.
void checkpoint();
// The same without a look at signals: for tasks that use tile registers.
void stop_if_interrupted();

}  // namespace attlas
