// What the fake driver was asked once all Python is over, told on stdout: no assertion can run so late.
#include <cstdio>
#include <cstdlib>

extern "C" {

long fake_calls(const char* name);
const char* fake_trace();

// Exit handlers run in reverse, static destructors of what was loaded later among them. So a program calls this before it
// loads anything that may call the driver. What the handler reads is made first, and so is destroyed after it.
void fake_tell_at_exit() {
  fake_calls("");
  fake_trace();
  std::atexit([] {
    std::printf("%ld driver calls since the last clear: %s\n", fake_calls(""), fake_trace());
    std::fflush(stdout);
  });
}

}  // extern "C"
