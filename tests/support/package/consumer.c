#include <epd/epd.h>
#include <stdio.h>

/* Every initialiser must be good C. */
int main(void) {
  epd_attach_options_t options;
  epd_attach_options_init(&options);
  epd_session_info_t info;
  epd_session_info_init(&info);
  epd_group_config_t config;
  epd_group_config_init(&config);
  epd_buffers_t buffers;
  epd_buffers_init(&buffers);
  epd_resume_info_t resume;
  epd_resume_info_init(&resume);
  epd_dispatch_args_t dispatch;
  epd_dispatch_args_init(&dispatch);
  epd_combine_args_t combine;
  epd_combine_args_init(&combine);
  epd_result_t result;
  epd_result_init(&result);
  epd_counts_t counts;
  epd_counts_init(&counts);
  epd_session_t* session = NULL;
  options.socket_path = "/nonexistent/epd.sock";
  if (epd_session_attach(&options, &session) != EPD_DAEMON_LOST || session != NULL) return 1;
  printf("%s\n", epd_version());
  return info.size + config.size + buffers.size + resume.size + dispatch.size + combine.size + result.size +
                     counts.size >
                 0
             ? 0
             : 1;
}
